#!/usr/bin/env bash
# GPU evidence in stages, each in its own server process; results are written as they come, so that a run that is cut
# short loses only its last stage.
#
#   RESULTS=dir MODELS=dir bash benchmarks/gpu/run.sh rank flash off checks prefill-graph decode
#
# MODELS holds config folders `rank` and `flash`; the engine, this plugin, benchmarks/gpu/checks and weights that carry
# signal must be importable. One GPU, nothing else running on it.
set -u
cd "$(dirname "$0")/../.."
mkdir -p "$RESULTS"
control=$(mktemp)
serve() { # stage, seconds, arguments
    local stage=$1 seconds=$2
    shift 2
    echo "== $stage $(date -u +%T)" | tee -a "$RESULTS/summary.txt"
    timeout --kill-after=5 "$seconds" python3 benchmarks/gpu/serve.py --json "$RESULTS/$stage.json" "$@" >"$RESULTS/$stage.log" 2>&1
    grep -E 'dsv4-graphs:|^(ROW|FIRST|UP|CHECK|CHURN|TOKENS) |^[A-Za-z.]*Error' "$RESULTS/$stage.log" | cut -c1-400 | tee -a "$RESULTS/summary.txt"
    [ -s "$RESULTS/$stage.json" ] || echo "$stage: no result" | tee -a "$RESULTS/summary.txt"
}
for stage in "$@"; do
    case $stage in
    rank | flash) DSV4_GRAPHS_CONTROL=$control serve "$stage" 200 --model "$MODELS/$stage" --toggle --cases cold,hits,batches,chunked --reps 5 ;;
    on | off) SGLANG_DSV4_GRAPHS=$([ "$stage" = on ] && echo 1 || echo 0) serve "rank-$stage" 110 --model "$MODELS/rank" --cases cold --reps 7 ;;
    flash-on | flash-off) SGLANG_DSV4_GRAPHS=$([ "$stage" = flash-on ] && echo 1 || echo 0) serve "$stage" 110 --model "$MODELS/flash" --cases cold --reps 7 ;;
    checks) SGLANG_DSV4_FULL_LAYER_GRAPH_MAX_TOKENS=8192 DSV4_GRAPHS_CHECK=$RESULTS/replay-vs-eager.json serve checks 200 --model "$MODELS/rank" --cases none ;;
    profile) DSV4_GRAPHS_CONTROL=$control serve profile 120 --model "$MODELS/rank" --toggle --cases none --profile "$RESULTS/profile.txt" ;;
    prefill-graph) python3 benchmarks/gpu/prefill_graph.py default small | tee -a "$RESULTS/summary.txt" ;;
    decode) DSV4_GRAPHS_CONTROL=$control serve decode 590 --model "$MODELS/rank" --toggle --cases none --decode 64 ;;
    *) echo "unknown stage $stage" >&2 && exit 2 ;;
    esac
done

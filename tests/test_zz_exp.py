from tests.fresh import in_fresh_process
from tests.distributions import install_distribution, PLUGIN
import sys
def other():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    M = "sglang.srt.models.deepseek_v4.DeepseekV4Model._forward_layers_hc_pre_from_prev"
    def theirs(o,*a,**k): 
        print("theirs"); return o(*a,**k)
    HookRegistry.register(M, theirs, HookType.AROUND)
def scen():
    import time
    t=time.time()
    from sglang.srt import plugins
    plugins.load_plugins()
    print("imported", "sglang.srt.models.deepseek_v4" in sys.modules, time.time()-t)
    import sglang.srt.models.deepseek_v4 as M
    f=M.DeepseekV4Model._forward_layers_hc_pre_from_prev
    chain=[]
    while f is not None:
        chain.append([getattr(c.cell_contents,"__qualname__",str(c.cell_contents)) for c in (f.__closure__ or ())])
        f=getattr(f,"__wrapped__",None)
    return chain
def test_a(tmp_path):
    a=install_distribution(tmp_path/"a","sglang-dsv4-graphs",PLUGIN)
    b=install_distribution(tmp_path/"b","other",{"sglang.srt.plugins":{"other":"tests.test_zz_exp:other"}})
    f=in_fresh_process(scen,path=[a,b])
    print(f.output, f.value)
    f=in_fresh_process(scen,path=[a])
    print(f.output, f.value)

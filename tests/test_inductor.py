"""compile=inductor: which calls become regions, that plans keep their numbers, what is refused, what is kept."""

from __future__ import annotations

import logging
import operator
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import strategies
import torch
from device_library import CACHE
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional as F

import plait
from plait.api.job.metrics import compile_progress
from plait.backends.eager.rewrites.bucket_gradients import bucket_start
from plait.backends.inductor import inductor_backend, region_compiler, toolchain
from plait.backends.inductor.inductor_backend import functions_of, make_with_regions
from plait.backends.inductor.region_compiler import CompileReport, compile_regions
from plait.backends.inductor.region_graph import RegionFunction, graph_of_region, text_of, with_regions
from plait.backends.inductor.regions import FusedRegion, free_views, regions_of
from plait.compile.ir.calls import is_view
from plait.compile.ir.estimate import flops_of
from plait.compile.ir.node_info import NodeInfo, describe, info_of
from plait.compile.rank_program import RankProgram
from plait.engine.compiler import Captures, Compiler
from plait.errors import PlanError
from plait.plan.legality import refusals
from plait.plan.plan import Plan
from plait.plan.step_facts import Place, StepFacts

aten = torch.ops.aten
pytestmark = pytest.mark.xdist_group("inductor")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.drop, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(8, 8, dtype=dtype), "y": torch.randint(0, 6, (8,))}


def program(plan: str) -> RankProgram:
    return Compiler(Captures(net(), loss_fn), Plan.parse(plan)).compiled(batch()).program


@pytest.fixture(scope="module")
def verifier() -> plait.Verifier:
    return plait.Verifier(net(), loss_fn, batch())


# Regions that run their calls one by one: all but what Inductor itself does.


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_backend, "compile_regions", lambda functions, plan: CompileReport(0, 0, 0, 0.0))


@pytest.mark.parametrize("case", strategies.CASES)
def test_every_strategy_keeps_its_numbers_with_regions(case: str, uncompiled: None) -> None:
    report = strategies.verified(case, "compile=inductor")
    assert report.ok, report


def test_every_strategy_of_the_readme_has_plans() -> None:
    rows = strategies.rows_of_readme()
    assert [next((words for words in strategies.PLANS if row.startswith(words)), row) for row in rows] == [
        *strategies.PLANS
    ]


def test_equal_layers_have_equal_regions() -> None:
    functions = functions_of(make_with_regions(program("data=2")))
    texts = [each.text for each in functions]
    assert len({*functions}) == len({*texts})  # one function a text
    forward = [text for text in texts if "gelu.default" in text]
    backward = [text for text in texts if "gelu_backward" in text]
    assert (len(forward), len({*forward})) == (3, 1)
    assert (len(backward), len({*backward})) == (3, 2)  # the first needs no gradient of its input


def test_regions_end_where_ranks_exchange_and_where_backward_begins() -> None:
    graph = make_with_regions(program("tensor=2"))["alone"]
    nodes = list(graph.nodes)
    for node in nodes:
        if isinstance(node.target, RegionFunction):
            assert len({info_of(each).phase for each in node.target.graph.nodes if each.op == "call_function"}) == 1
    computing = [n for n in nodes if isinstance(n.target, torch._ops.OpOverload) and not n.target.is_view]
    computing = [n for n in computing if not flops_of(n)]  # products of weights' gradients run beside collectives
    assert len(computing) <= 6  # what takes this rank's index, and what stands alone between two collectives
    order = {node: index for index, node in enumerate(nodes)}
    starts = [n for n in nodes if "all_reduce_start" in n.name]
    assert starts
    assert all(order[start] - max(order[source] for source in start.all_input_nodes) <= 3 for start in starts)


def test_gradients_still_leave_while_backward_runs() -> None:
    nodes = list(make_with_regions(program("data=2 bucket=1KiB"))["alone"].nodes)
    starts = [i for i, n in enumerate(nodes) if n.target is bucket_start]
    regions = [i for i, n in enumerate(nodes) if isinstance(n.target, RegionFunction)]
    assert len(starts) >= 3
    assert sum(start < regions[-1] for start in starts) >= 2


def test_modules_are_left_out_by_name() -> None:
    graphs = make_with_regions(program("data=2 compile=inductor compile.layers.1=none"))
    inside = {info_of(n).module for f in functions_of(graphs) for n in f.graph.nodes if n.op == "call_function"}
    assert "layers.2.norm" in inside
    assert not any(module.startswith("layers.1.") for module in inside)


def a_graph() -> tuple[Graph, Node, Node]:
    """A graph with two inputs: a matrix, and the sum so far of a gradient."""
    graph = Graph()
    x, total = graph.placeholder("x"), graph.placeholder("total")
    describe(x, NodeInfo(kind="batch"), torch.empty(4, 6, device="meta"))
    describe(total, NodeInfo(kind="sum"), torch.empty(6, 4, device="meta"))
    return graph, x, total


def call(graph: Graph, op: Any, *args: Any) -> Node:
    node = graph.call_function(op, args)
    values = [a.meta["val"] if isinstance(a, Node) else a for a in args]
    describe(node, NodeInfo(phase="forward"), op(*values))
    return node


def run(graph: Graph, *args: Tensor) -> Any:
    return torch.fx.GraphModule({}, graph)(*args)


def test_views_cross_no_border_and_sums_are_written_where_they_are() -> None:
    graph, x, total = a_graph()
    y = call(graph, aten.exp.default, call(graph, aten.t.default, x))
    z = call(graph, aten.add_.Tensor, call(graph, aten.mul.Tensor, y, 2.0), y)  # into memory that the graph made
    turned = call(graph, aten.t.default, z)
    copied = call(graph, aten.reshape.default, call(graph, aten.t.default, y), [4, 6])
    copied = call(graph, aten.reshape.default, z, [24])  # no view: z is laid out as x turned, so it has to copy
    added = call(graph, aten.add_.Tensor, total, z)  # into memory that lives on
    graph.output((turned, copied, added))

    views = free_views(graph)
    assert turned in views
    assert copied not in views
    (region,) = [step for step in regions_of(graph, views) if isinstance(step, FusedRegion)]
    assert region.inputs == (x,)
    assert {*region.outputs} == {z, copied}
    inner = graph_of_region(region, views)
    assert not any(n.target in (aten.add_.Tensor,) for n in inner.nodes)

    function = RegionFunction(inner, text_of(inner))
    again = with_regions(graph, regions_of(graph, views), {region: function})
    a, sums = torch.randn(4, 6), torch.ones(6, 4)
    expected, found = run(graph, a, sums.clone()), run(again, a, sums)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.stride() == other.stride()
    assert found[2] is sums
    assert found[0]._base is not None


def test_calls_that_no_compiler_sees_into_run_before_a_region_or_behind_it() -> None:
    def opaque(tensor: Tensor) -> Tensor:
        return tensor + 1

    graph, x, _ = a_graph()
    y = call(graph, aten.exp.default, x)
    early, late = call(graph, opaque, x), call(graph, opaque, y)
    z = call(graph, aten.mul.Tensor, y, early)
    last = call(graph, aten.mul.Tensor, z, late)
    more = call(graph, aten.cos.default, last)
    graph.output((more,))
    steps = regions_of(graph, free_views(graph))
    assert steps[0] is early
    assert [step.calls for step in steps if isinstance(step, FusedRegion)] == [(y, z), (last, more)]
    assert steps[2] is late


def test_other_axes_of_a_mesh_and_other_strides_make_other_texts() -> None:
    texts = set()
    for strided in (torch.empty(4, 6, device="meta"), torch.empty(6, 4, device="meta").t()):
        graph, x, _ = a_graph()
        x.meta["val"] = strided
        graph.output((call(graph, aten.exp.default, call(graph, aten.exp.default, x)),))
        (region,) = [step for step in regions_of(graph, frozenset()) if isinstance(step, FusedRegion)]
        texts.add(text_of(graph_of_region(region, frozenset())))
    assert len(texts) == 2


def test_with_cuda_graphs_each_call_has_its_function_and_results_have_memory_of_their_own() -> None:
    plan = "tensor=2 micro=2 compile=inductor cudagraphs=yes"
    graphs = make_with_regions(program(plan))
    functions = functions_of(graphs)
    assert len({*functions}) == len(functions) > len({each.text for each in functions})
    for each in functions:
        given = [node.meta["val"] for node in each.graph.nodes if node.op == "placeholder"]
        assert all(given[index].ndim in (1, 2) for index in each.fixed)
    assert sum(len(each.fixed) for each in functions) > 20
    versions = f"{plan} pipeline=2 schedule=pipedream"  # of which a cell may read an older one
    assert not any(each.fixed for each in functions_of(make_with_regions(program(versions))))
    copied = 0
    for graph in graphs.values():
        (results,) = next(node for node in graph.nodes if node.op == "output").args
        assert not any(_is_of_region(result) for result in results)
        copied += sum(result.target is aten.clone.default for result in results)
    assert copied > 10


def _is_of_region(node: Node) -> bool:
    while node.op == "call_function" and (node.target is operator.getitem or is_view(node)):
        node = node.all_input_nodes[0]
    return isinstance(node.target, RegionFunction)


def test_cuda_graphs_are_refused_on_cpu() -> None:
    plan = Plan.parse("compile=inductor cudagraphs=yes")
    assert [str(each) for each in refusals(plan, StepFacts(), Place("cpu"))] == [
        "cudagraphs=yes: it records kernels of CUDA devices, and the ranks are on cpu; leave cudagraphs= out"
    ]
    assert refusals(plan, StepFacts(), Place("cuda")) == ()
    with pytest.raises(PlanError, match="cudagraphs=yes: it records kernels of CUDA devices"):
        plait.verify(net(), loss_fn, batch(), plan)


# With Inductor itself.


@pytest.fixture(scope="module")
def inductor() -> Iterator[Path]:
    """Inductor with a cache of its own, which stays for the next run, that compiles in this process."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    import torch._inductor.config as config

    place = CACHE / "inductor"
    settings = {"compile_threads": 1, "cpp.simdlen": 1}  # g++ takes longest over headers for vectors
    with pytest.MonkeyPatch.context() as patch, config.patch(settings):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(place))
        patch.setattr(region_compiler, "_compiled", {})
        yield place


@pytest.mark.parametrize(
    "plan",
    ["data=2", "data=2 zero=3", "pipeline=2 micro=2 tensor=2"],
)
def test_compiled_plans_keep_their_numbers(plan: str, verifier: plait.Verifier, inductor: Path) -> None:
    report = verifier.verify(f"{plan} compile=inductor", tolerance=1e-9)
    assert report.ok, report


class TwoBiases(nn.Module):
    """Biases with equal gradients, which Inductor computes once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.more = nn.Linear(8, 8), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) + self.more)


def test_equal_gradients_have_memory_of_their_own(inductor: Path) -> None:
    """Each is added to in place, by one microbatch after the other."""
    model = nn.Sequential(TwoBiases(), nn.Linear(8, 4)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    report = plait.verify(model, lambda m, x: m(x).square().mean(), x, "pipeline=2 micro=2 cut=1 compile=inductor")
    assert report.ok, report


def test_what_was_compiled_is_loaded_in_the_next_run(
    inductor: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._dynamo.utils import counters

    functions = functions_of(make_with_regions(program("data=2 compile=inductor")))
    compile_regions(functions, Plan.parse("data=2 compile=inductor"))
    monkeypatch.setattr(region_compiler, "_compiled", {})
    before = counters["inductor"]["fxgraph_cache_hit"]
    with caplog.at_level("INFO", logger="plait.inductor"):
        report = compile_regions(functions, Plan.parse("data=2 compile=inductor"))
    assert report.num_regions > report.num_distinct == report.num_compiled
    assert counters["inductor"]["fxgraph_cache_hit"] - before == report.num_distinct
    messages = [each.getMessage() for each in caplog.records if each.name == "plait.inductor"]  # torch traces too
    assert len(messages) == report.num_distinct
    assert f"region {report.num_distinct} of {report.num_distinct} in" in messages[-1]


def test_a_region_frees_what_only_it_is_given_and_takes_other_strides(inductor: Path) -> None:
    functions = functions_of(make_with_regions(program("data=2 compile=inductor")))
    compile_regions(functions, Plan.parse("data=2 compile=inductor"))
    function = next(each for each in functions if "gelu.default" in each.text)
    likes = [node.meta["val"] for node in function.graph.nodes if node.op == "placeholder"]
    given = [torch.rand(v.shape, dtype=v.dtype) for v in likes]
    turned = [t.t().contiguous().t() if t.ndim == 2 else t for t in given]
    expected = torch.fx.GraphModule({}, function.graph)(*given)
    refs = [weakref.ref(tensor) for tensor in turned]
    found = function(turned)
    assert turned == []
    del turned
    assert all(ref() is None for ref, mine in zip(refs, given, strict=True) if mine.ndim == 2)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert one.stride() == other.stride()


def test_a_job_says_what_it_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("plait.inductor")
    with compile_progress():
        log.info("region 1 of 2")
        log.info("region 2 of 2")  # within the same seconds
    log.info("nobody listens")
    assert capsys.readouterr().out == "region 1 of 2\n"
    assert str(CompileReport(32, 10, 10, 31.26)) == (
        "compile=inductor: 32 regions, 10 different; 10 compiled or loaded in 31.3 s"
    )


def test_an_op_that_does_not_compile_is_named(inductor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx as compile_fx

    monkeypatch.setattr(compile_fx, "compile_fx_inner", _fails)
    monkeypatch.setattr(region_compiler, "_compiled", {})
    plan = Plan.parse("data=2 compile=inductor")
    functions = [f for f in functions_of(make_with_regions(program(str(plan)))) if "gelu.default" in f.text]
    with pytest.raises(PlanError) as found:
        compile_regions(functions, plan)
    assert str(found.value) == (
        "compile=inductor cannot compile aten.gelu.default in layers.0: RuntimeError: LoweringException: no kernel;"
        " leave it out with compile.layers.0=none"
    )
    assert found.value.refusal is not None


def test_a_compiler_that_does_not_compile_is_named_and_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.compile_fx as compile_fx

    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'cmath: No such file' >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(PlanError, match="needs a compiler: .*g.. does not compile a program"):
        plait.Trainer(net(), loss_fn, torch.optim.SGD, "compile=inductor")
    monkeypatch.setattr(region_compiler, "_compiled", {})
    monkeypatch.setattr(compile_fx, "compile_fx_inner", _fails)
    plan = Plan.parse("compile=inductor")
    functions = functions_of(make_with_regions(program(str(plan))))[:1]
    with pytest.raises(PlanError, match="needs a compiler: .*g.. does not compile a program of .*: cmath: No such"):
        compile_regions(functions, plan)


def _fails(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("LoweringException: no kernel\n  target: aten.gelu.default")


def test_without_a_compiler_a_plan_is_refused_before_ranks_start(
    verifier: plait.Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(region_compiler, "_compiled", {})
    with pytest.raises(PlanError, match="compile=inductor needs a compiler: there is no no-such-compiler to compile"):
        verifier.verify("data=2 zero=1 compile=inductor")
    with pytest.raises(PlanError, match="needs a compiler"):
        plait.Trainer(net(), loss_fn, torch.optim.SGD, "compile=inductor")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    assert toolchain.missing_compiler("cuda") == "there is no gcc to compile C with, as Triton does"
    lacking = Place("cuda", lacks="the package triton is not installed")
    (refusal,) = refusals(Plan.parse("compile=inductor"), StepFacts(), lacking)
    assert refusal.why == lacking.lacks
    assert refusals(Plan.parse("data=2"), StepFacts(), lacking) == ()

"""Every rule against its op: parts put together are the whole."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from oracle import call_of, check, run_whole, same, strategies
from rule_makers import f
from rule_samples import all_samples
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from plait.compile.ops import OP_SPECS, Call, TensorSpec, op_spec
from plait.compile.ops.view import carry
from plait.spec.layout import REPLICATE, Partial, Shard

aten = torch.ops.aten
SAMPLES = all_samples()
ATEN = [op for op in OP_SPECS if getattr(op, "namespace", "") == "aten" and OP_SPECS[op].known]
DECOMPOSED = [op for op in ATEN if OP_SPECS[op].decompose is not None]
# Rules that only say that an op is known: its result is one number.
NOTHING_TO_CUT = {aten.scalar_tensor.default, aten.prod.default, aten.median.default, aten.nanmedian.default}
ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, operator.getitem}


@pytest.mark.parametrize("op", ATEN, ids=str)
def test_parts_make_the_whole(op: Any) -> None:
    samples = SAMPLES.get(op, [])
    assert samples, f"{op} has a rule but no sample"
    torch.manual_seed(0)
    tried = sum(check(sample, OP_SPECS[op]) for sample in samples)
    assert tried or op in DECOMPOSED or op in NOTHING_TO_CUT, f"no sample of {op} can be cut"


@pytest.mark.parametrize("op", DECOMPOSED, ids=str)
def test_decomposition_computes_the_same_from_ops_with_rules(op: Any) -> None:
    for sample in SAMPLES[op]:
        leaves, tree = tree_flatten((sample.args, sample.kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]

        def run(*given: Tensor, leaves: Any = leaves, tree: Any = tree) -> Any:
            rest = iter(given)
            args, kwargs = tree_unflatten([next(rest) if isinstance(x, Tensor) else x for x in leaves], tree)
            return OP_SPECS[op].decompose(*args, **kwargs)

        traced = make_fx(torch.func.functionalize(run), tracing_mode="real")(*tensors)
        for node in traced.graph.nodes:
            if node.op == "call_function" and node.target not in ALIASES:
                assert op_spec(node.target).known, f"the decomposition of {sample} has {node.target}, which has no rule"
        found = traced(*tensors)
        found = found if isinstance(found, (tuple, list)) else (found,)
        for result, wanted in zip(found, run_whole(sample), strict=True):
            if isinstance(wanted, Tensor) and isinstance(result, Tensor):
                same(result, wanted, str(sample))


@pytest.mark.parametrize(
    ("source", "target", "shard", "size", "wanted"),
    [
        ((8, 96), (8, 3, 4, 8), Shard(1, 3), 2, Shard(2, 1)),  # a fused q, k, v: heads
        ((8, 96), (8, 3, 4, 8), Shard(1), 3, Shard(1)),
        ((8, 3, 4, 8), (8, 96), Shard(2), 2, Shard(1, 3)),
        ((2, 16, 4, 8), (32, 32), Shard(1), 2, Shard(0, 2)),  # a sequence within a batch
        ((32, 32), (2, 16, 4, 8), Shard(0, 2), 4, Shard(1)),
        ((4, 6), (24,), Shard(1), 2, Shard(0, 4)),
        ((4, 6), (6, 4), Shard(0), 2, Shard(0)),
        ((4, 6), (3, 8), Shard(0), 2, None),  # rank 1 starts in the middle of a row
        ((8, 12), (8, 3, 4), Shard(1), 4, None),  # one rank's part is not a head
    ],
)
def test_views_carry_shards_by_the_flat_index(source: Any, target: Any, shard: Shard, size: int, wanted: Any) -> None:
    assert carry(source, target, shard, size) == wanted


def test_views_lead_back_from_what_a_reader_wants() -> None:
    sample = next(s for s in SAMPLES[aten.view.default] if s.args[1] == [6, 36])
    call = call_of(sample, run_whole(sample))
    assert call.inputs[0].shape == (6, 3, 12)
    found = strategies(OP_SPECS[aten.view.default], call, 2)
    assert ((Shard(2),), (Shard(1, 3),)) in found


def test_cross_entropy_over_a_cut_vocabulary_makes_terms() -> None:
    call = Call(
        aten.nll_loss_forward.default,
        (TensorSpec((6, 12), torch.float32), TensorSpec((6,), torch.int64, 1), None, 1, -100),
        {},
        (TensorSpec((6, 12), torch.float32), TensorSpec((6,), torch.int64, 1)),
        (TensorSpec((), torch.float32), TensorSpec((), torch.float32, 1)),
    )
    found = strategies(OP_SPECS[call.op], call, 2)
    assert ((Shard(1), REPLICATE), (Partial(), REPLICATE)) in found


def test_a_number_added_to_a_partial_sum_is_not_linear() -> None:
    for args, linear in (((f(6), f(6)), True), ((f(6), 2), False)):
        sample = type(SAMPLES[aten.add.Tensor][0])(aten.add.Tensor, args, {})
        call = call_of(sample, run_whole(sample))
        terms = [s for s in strategies(OP_SPECS[sample.op], call, 2).values() if Partial() in s.inputs]
        assert bool(terms) is linear

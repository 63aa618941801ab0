"""Sample arguments of whole families of ops: reductions, losses, pooling, resampling."""

from __future__ import annotations

from typing import Any

import torch
from rule_makers import Args, b, f, i, op_of, u

_SCORES, _TARGET = f(6, 12), i(12, 6)
_IGNORING = torch.tensor([3, -100, 5, 11, -100, 0])
_SCORES2, _TARGET2 = f(6, 12, 2, 6), i(12, 6, 2, 6)
PLANES = {1: f(6, 12, 4), 2: f(6, 12, 4, 4), 3: f(6, 12, 2, 2, 2)}


def _pooled(name: str, *args: Any) -> Args:
    x = PLANES[3 if "3d" in name else 2]
    out, indices = op_of(name)(x, *args)
    return (f(*out.shape), x, *args, indices)


def losses() -> dict[str, list[Args]]:
    found: dict[str, list[Args]] = {}
    x, y = u(6, 12), u(6, 12)
    for name, extra, weighted in (
        ("mse_loss", (), False),
        ("smooth_l1_loss", (0.7,), False),
        ("huber_loss", (0.7,), False),
        ("soft_margin_loss", (), False),
        ("binary_cross_entropy", (), True),
    ):
        weight = (u(6, 12),) if weighted else ()
        found[name] = [(x, y, *weight, r, *extra) for r in range(3)]
        found[f"{name}_backward"] = [(f(6, 12) if r == 0 else f(), x, y, *weight, r, *extra) for r in range(3)]
    found["binary_cross_entropy_with_logits"] = [(f(6, 12), y, None, u(12), r) for r in range(3)]
    for suffix, scores, target in (("", _SCORES, _TARGET), ("2d", _SCORES2, _TARGET2)):
        forward, backward = found.setdefault(f"nll_loss{suffix}_forward", []), []
        for weight in (None, u(12)):
            for r in range(3):
                kept = target if suffix else _IGNORING
                forward += [(scores, kept, weight, r, -100)]
                total = op_of(f"nll_loss{suffix}_forward")(scores, kept, weight, r, -100)[1]
                grad = f(*target.shape) if r == 0 else f()
                backward += [(grad, scores, kept, weight, r, -100, total)]
        found[f"nll_loss{suffix}_backward"] = backward
    grads = [f(6), f(), f()]
    labels, many = i(12, 6), torch.where(torch.arange(12) < 2, i(12, 6, 12), -1)
    is_target = op_of("multilabel_margin_loss_forward")(x, many, 0)[1]
    found["multi_margin_loss"] = [(x, labels, 1, 1.0, w, r) for w in (None, u(12)) for r in range(3)]
    found["multi_margin_loss_backward"] = [(grads[r], x, labels, 1, 1.0, u(12), r) for r in range(3)]
    found["multilabel_margin_loss_forward"] = [(x, many, r) for r in range(3)]
    found["multilabel_margin_loss_backward"] = [(grads[r], x, many, r, is_target) for r in range(3)]
    found["nll_loss_forward"].append((f(12), torch.tensor(5), None, 1, -100))
    found["nll_loss_backward"].append((f(), f(12), torch.tensor(5), None, 1, -100, torch.tensor(1.0).double()))
    return found


def resampling() -> dict[str, list[Args]]:
    found: dict[str, list[Args]] = {}
    for n, modes in {
        1: ("nearest1d", "_nearest_exact1d", "linear1d"),
        2: ("nearest2d", "_nearest_exact2d", "bilinear2d", "bicubic2d", "_bilinear2d_aa", "_bicubic2d_aa"),
        3: ("nearest3d", "_nearest_exact3d", "trilinear3d"),
    }.items():
        for mode in modes:
            name = f"_upsample{mode}" if mode.startswith("_") else f"upsample_{mode}"
            corners = () if "nearest" in mode else (False,)
            x = PLANES[n]
            out = [2 * s for s in x.shape[2:]]
            found[name] = [(x, out, *corners)]
            found[f"{name}.vec"] = [(x, None, *corners, [2.0] * n)]
            found[f"{name}_backward"] = [(f(*x.shape[:2], *out), out, list(x.shape), *corners)]
    return found


def pools() -> dict[str, list[Args]]:
    found: dict[str, list[Args]] = {}
    for n in (2, 3):
        x = PLANES[n]
        window = ([2] * n, [1] * n, [1] * n, False, True, None)
        average = op_of(f"avg_pool{n}d")(x, *window)
        found[f"avg_pool{n}d"] = [(x, *window)]
        found[f"avg_pool{n}d_backward"] = [(f(*average.shape), x, *window)]
        found[f"_adaptive_avg_pool{n}d"] = [(x, [1] * n)]
        found[f"_adaptive_avg_pool{n}d_backward"] = [(f(6, 12, *[1] * n), x)]
        most = ([2] * n, [2] * n, [0] * n, [1] * n, False)
        found[f"max_pool{n}d_with_indices"] = [(x, *most)]
        found[f"max_pool{n}d_with_indices_backward"] = [_pooled(f"max_pool{n}d_with_indices", *most)]
        found[f"adaptive_max_pool{n}d"] = [(x, [1] * n)]
        grad, _, _, indices = _pooled(f"adaptive_max_pool{n}d", [1] * n)
        found[f"adaptive_max_pool{n}d_backward"] = [(grad, x, indices)]
        small, places = op_of(f"max_pool{n}d_with_indices")(x, *most)
        size = list(x.shape[2:])
        found[f"max_unpool{n}d"] = [(small, places, size, *([[2] * n, [0] * n] if n == 3 else []))]
        places = u(6, 12, n)
        pooled, chosen = op_of(f"fractional_max_pool{n}d")(x, [1] * n, [1] * n, places)
        found[f"fractional_max_pool{n}d"] = [(x, [1] * n, [1] * n, places)]
        found[f"fractional_max_pool{n}d_backward"] = [(f(*pooled.shape), x, [1] * n, [1] * n, chosen)]
    for n in (1, 2, 3):
        for kind in ("reflection", "replication"):
            pad = [1, 1] * n
            out = op_of(f"{kind}_pad{n}d")(PLANES[n], pad)
            found[f"{kind}_pad{n}d"] = [(PLANES[n], pad)]
            found[f"{kind}_pad{n}d_backward"] = [(f(*out.shape), PLANES[n], pad)]
    return found


def reductions() -> dict[str, list[Args]]:
    x = f(6, 12, 4)
    found: dict[str, list[Args]] = {
        name: [(x,)]
        for name in (
            "sum", "mean", "max", "min", "any", "all", "prod", "argmax", "argmin", "median", "nanmedian", "nansum",
            "norm.Scalar",
        )
    }  # fmt: skip
    for name in ("sum.dim_IntList", "mean.dim", "amax", "amin", "var.dim", "std.dim", "var_mean.dim", "std_mean.dim"):
        flag = (True,) if name.startswith(("var", "std")) else ()
        found[name] = [(x, [1], *flag, True), (x, [0, -1], *flag, False)]
    for name in ("var", "std", "var_mean", "std_mean"):
        found[name] = [(x, False), (x, True)]
        found[f"{name}.correction"] = [(x, [1], {"correction": 0}), (x, None, {}), (x, [0, 2], {"keepdim": True})]
    for name in ("prod.dim_int", "max.dim", "min.dim", "argmax", "argmin", "median.dim", "nanmedian.dim", "mode"):
        found.setdefault(name, []).extend([(x, 1), (x, -1, True)])
    found["sum.dim_IntList"] += [(i(9, 6, 12), [0]), (x, [])]
    found["any.dim"] = found["all.dim"] = [(b(6, 12), 1), (b(6, 12), 0, True)]
    found["any.dims"] = found["all.dims"] = [(b(6, 12), [1]), (b(6, 12), None), (b(6, 12), [])]
    found["count_nonzero"] = found["count_nonzero.dim_IntList"] = [(i(2, 6, 12), [1])]
    found["count_nonzero"] = [(i(2, 6, 12),)]
    found["linalg_vector_norm"] = [(x, p, [1]) for p in (0, 1, 2, 3.0, float("inf"), float("-inf"))]
    found["norm.ScalarOpt_dim"] = [(x, 2, [1], True), (x, None, [0], False)]
    found["logsumexp"] = [(x, [1]), (x, [0, 2], True), (torch.full((6, 12), float("-inf")).double(), [1])]
    for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort"):
        found[name] = [(x, 1), (x, -1)]
    found["sort.stable"] = [(x, {"stable": True, "dim": 1})]
    found["topk"] = [(x, 3), (x, 2, 0)]
    found["histc"] = [(u(6, 12), 4, 0, 1), (u(6, 12), 4)]
    return found


def matrices() -> dict[str, list[Args]]:
    """A batch of small matrices for each op of linear algebra."""
    a, b, v = f(6, 3, 3), f(6, 3, 2), f(6, 3)
    good = a @ a.mT + torch.eye(3, dtype=a.dtype)
    factor, (lu, pivots) = torch.linalg.cholesky(good), torch.linalg.lu_factor(good)
    names = (
        "linalg_cholesky_ex", "cholesky", "linalg_inv_ex", "linalg_matrix_exp", "_linalg_eigh", "linalg_eig",
        "linalg_qr", "linalg_lu_factor_ex", "linalg_lu", "_linalg_det", "_linalg_slogdet",
    )  # fmt: skip
    return {
        **{name: [(good,)] for name in names},
        "_linalg_svd": [(a,), (a, False, False)],
        "cholesky_inverse": [(factor,)],
        "cholesky_solve": [(b, factor)],
        "_linalg_solve_ex": [(good, b), (good, v)],
        "linalg_lu_solve": [(lu, pivots, b)],
        "lu_unpack": [(lu, pivots)],
        "linalg_solve_triangular": [(factor, b, {"upper": False})],
        "triangular_solve": [(b, factor, False)],
        "linalg_householder_product": [(f(6, 3, 2), f(6, 2))],
        "linalg_pinv.atol_rtol_tensor": [
            (a, {"atol": torch.tensor(0.0).double(), "rtol": torch.tensor(1e-9).double()})
        ],
    }

"""Sample arguments of ops, by name; keyword arguments come in a dict at the end."""

from __future__ import annotations

import torch
from rule_families import PLANES, losses, matrices, pools, reductions, resampling
from rule_makers import Args, aten, b, f, i, u
from torch import Tensor

HALF = {"dtype": torch.float32}
STATS = (u(12), u(12))
NORM = (f(6, 12, 4), u(12), f(12), *STATS)
SAVED = (f(12), u(12))
ALL = [True, True, True]
CONV = ([1, 1], [1, 1], [1, 1])
X = f(6, 12, 4, 4)
Q, K, V = f(6, 12, 6, 2), f(6, 12, 4, 2), f(6, 12, 4, 2)
MASK = f(6, 1, 6, 4)


def _attention(causal: bool, **mask: Tensor) -> Args:
    kwargs = {f"attn_{k}": v for k, v in mask.items()}
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(Q, K, V, 0.0, causal, **kwargs)
    return (f(*Q.shape), Q, K, V, out, lse, 0.0, causal, kwargs)


def alike(names: tuple[str, ...], samples: list[Args]) -> dict[str, list[Args]]:
    """One list of samples for several ops."""
    return {name: samples for name in names}


def table() -> dict[str, list[Args]]:
    """By op name: arguments, with keyword arguments in a dict at the end."""
    x = f(6, 12, 4)
    grid = i(6, 6, 12)
    return {
        **reductions(),
        **losses(),
        **resampling(),
        **pools(),
        "_prelu_kernel_backward": [(f(6, 12), f(6, 12), f(6, 12))],
        "rrelu_with_noise_backward": [(f(6, 12), f(6, 12), u(6, 12), 0.1, 0.3, True, False)],
        "log_sigmoid_forward": [(x,)],
        "log_sigmoid_backward": [(x, f(6, 12, 4), aten.log_sigmoid_forward(x)[1])],
        "zeros_like": [(x,)],
        "ones_like": [(x,)],
        "full_like": [(x, 3)],
        "zeros": [([6, 12],)],
        "ones": [([6, 12],)],
        "full": [([6, 12], 2.0)],
        "new_zeros": [(x, [6, 12]), (x, [4])],
        "new_ones": [(x, [6, 12])],
        "new_full": [(x, [6, 12], 3.0)],
        "scalar_tensor": [(3.0,)],
        "arange": [(12,), (12, HALF)],
        "arange.start": [(3, 15)],
        "arange.start_step": [(1, 25, 2), (30, 6, -2), (0.0, 6.0, 0.5)],
        "_assert_tensor_metadata": [(x, [6, 12, 4], None, torch.float64)],
        # products
        "mm": [(f(6, 12), f(12, 18))],
        "bmm": [(f(6, 12, 4), f(6, 4, 12))],
        "mv": [(f(6, 12), f(12))],
        "dot": [(f(12), f(12))],
        "addmm": [(f(18), f(6, 12), f(12, 18)), (f(6, 1), f(6, 12), f(12, 18), {"beta": 2, "alpha": 3}),
                  (i(3, 18), i(3, 6, 12), i(3, 12, 18))],
        "baddbmm": [(f(6, 12, 6), f(6, 12, 4), f(6, 4, 6)), (f(1, 12, 1), f(6, 12, 4), f(6, 4, 6))],
        "addbmm": [(f(6, 18), f(4, 6, 12), f(4, 12, 18)),
                   (f(6, 1), f(4, 6, 12), f(4, 12, 18), {"beta": 2, "alpha": 3})],
        "addr": [(f(6, 12), f(6), f(12)), (f(12), f(6), f(12), {"beta": 0, "alpha": 3})],
        "vdot": [(f(12), f(12)), (torch.complex(f(12), f(12)), torch.complex(f(12), f(12)))],
        "dist": [(f(6, 12), f(6, 12)), (f(6, 12), f(12), 1)],
        "trace": [(f(6, 12),)],
        "linalg_cross": [(f(6, 12, 3), f(6, 12, 3)), (f(6, 3, 12), f(1, 3, 12), {"dim": 1})],
        "addmv": [(f(6), f(6, 12), f(12))],
        "linear": [(f(6, 2, 12), f(18, 12), f(18)), (f(6, 12), f(18, 12))],
        "matmul": [(f(6, 12), f(12, 6)), (f(6, 2, 4, 12), f(2, 12, 6)), (f(1, 2, 4, 12), f(6, 1, 12, 6))],
        "_trilinear": [(f(6, 12), f(4, 12, 18), f(6, 18), [1, 3], [0], [1, 2], [2, 3])],
        "glu": [(f(6, 36, 4), 1), (f(6, 12),)],
        "glu_backward": [(f(6, 18, 4), f(6, 36, 4), 1)],
        # views
        **alike(
            ("view", "_unsafe_view", "reshape"),
            [
                (f(6, 12, 4), [72, 4]), (f(72, 4), [6, 12, 4]), (f(6, 36), [6, 3, 12]), (f(36, 6), [3, 12, 6]),
                (f(6, 1, 12), [1, 6, 12]), (f(12, 12), [144]), (f(6, 36), [12, 18]), (f(6, 3, 12), [6, 36]),
                (f(4, 36), [4, -1, 6, 1]), (f(1), []), (f(18, 4, 6), [-1, 12]),
            ],
        ),
        "_reshape_alias": [(f(6, 12), [72], [1])],
        "_reshape_copy": [(f(6, 12), [72])],
        "t": [(f(6, 12),), (f(6),)],
        "transpose.int": [(x, 0, -1)],
        "permute": [(x, [2, 0, -2])],
        "squeeze": [(f(6, 1, 12),), (f(2, 3, 1),)],
        "squeeze.dim": [(f(6, 1, 12), 1), (f(2, 1, 12), 0)],
        "squeeze.dims": [(f(6, 1, 12, 1), [1, -1]), (f(2, 3, 1), [0, 1, 2]), (f(2, 3, 1), [])],
        "unsqueeze": [(x, 0), (x, -1), (x, 1)],
        "select.int": [(x, 1, 3), (x, -1, 0)],
        "diagonal": [(x, 0, 0, 2), (f(12, 12),)],
        "unfold": [(x, 1, 3, 2), (x, -1, 2, 1)],
        "expand": [(f(6, 1, 4), [12, 6, 12, -1]), (f(12), [6, 12]), (f(), [6])],
        "flip": [(x, [1]), (x, [0, -1])],
        "rot90": [(x, 1, [1, 2]), (x, 2, [0, -1])],
        "roll": [(x, [2], [1]), (x, [3])],
        "view_as_complex": [(f(6, 12, 2),)],
        "view_as_real": [(torch.complex(f(6, 12), f(6, 12)),)],
        "tril": [(x,)],
        "triu": [(x, 1)],
        "repeat": [(f(6, 12), [1, 2]), (f(6, 1), [1, 6]), (f(12), [6, 3]), (f(12), [1])],
        "constant_pad_nd": [(x, [1, 2]), (x, [0, 0, 1, -1], 2.0), (x, [0, 0, 0, 0], 1.0)],
        # pieces
        "slice.Tensor": [(f(36, 6), 0, 12, 24), (f(36, 6), 0, 0, 24), (f(6, 12), 1, 2, 9, 2), (f(6, 12), 1, -6),
                         (f(6, 36), 1, 1, 36, 2), (f(6, 36), 1, 0, 36, 3), (f(6, 12), 1, 2, 12, 2),
                         (f(6, 12), 0, 0, 9223372036854775807)],
        "split.Tensor": [(f(6, 36), 12, 1), (f(6, 36), 24, -1), (f(12, 4), 6)],
        "unsafe_split.Tensor": [(f(6, 36), 12, 1)],
        "split_with_sizes": [(f(6, 36), [12, 24], 1), (f(6, 36), [5, 31], 1)],
        "unsafe_split_with_sizes": [(f(6, 36), [12, 24], 1)],
        "chunk": [(f(6, 36), 3, 1)],
        "unsafe_chunk": [(f(6, 36), 3, 1)],
        "unbind.int": [(x,), (x, -1)],
        "cat": [([f(6, 12), f(6, 12), f(6, 12)], 1), ([f(6, 12), f(6, 24)], -1), ([f(0), f(6, 12)], 0),
                ([f(12, 4)],), ([f(6, 5), f(6, 7)], 1)],
        "stack": [([f(6, 12), f(6, 12)],), ([f(6, 12), f(6, 12)], -1), ([f(6, 12)], 1)],
        "slice_backward": [(f(6, 18), [6, 36], 1, 1, 36, 2), (f(6, 12), [6, 36], 1, 0, 36, 3),
                           (f(6, 12), [6, 36], 1, 12, 24, 1), (f(6, 24), [6, 36], 1, 0, -12, 1),
                           (f(6, 6), [6, 12], 1, 0, 9223372036854775807, 2), (f(6, 12), [6, 12], 1, 0, 12, 1)],
        "select_backward": [(f(6, 4), [6, 12, 4], 1, 3)],
        "diagonal_backward": [(aten.diagonal(x, 0, 0, 2), [6, 12, 4], 0, 0, 2)],
        "unfold_backward": [(aten.unfold(x, 1, 3, 2), [6, 12, 4], 1, 3, 2)],
        "slice_scatter": [(x, f(6, 4, 4), 1, 2, 6)],
        "diag_embed": [(f(6, 12),), (f(6, 12), 1, 0, 2)],
        "diagonal_scatter": [(x, aten.diagonal(x, 0, 0, 2), 0, 0, 2), (f(12, 6), f(5), 1)],
        "select_scatter": [(x, f(6, 4), 1, 3), (x, f(12, 4), 0, 3)],
        "as_strided": [(f(6, 12, 1, 1), [6, 12, 1, 1], [12, 1, 12, 12]), (f(6, 12), [5, 3], [1, 12], 2),
                       (f(12, 6).t(), [12, 6], [6, 1])],
        "as_strided_scatter": [(f(72), f(6, 12), [6, 12], [12, 1]), (f(6, 12), f(5, 3), [5, 3], [1, 12], 2)],
        # indices
        "embedding": [(f(12, 6), i(12, 6, 4)), (f(36, 6), i(36, 6), 3)],
        "embedding_dense_backward": [(f(6, 4, 6), i(12, 6, 4), 12, -1, False), (f(24, 6), i(6, 24), 6, 2, False),
                                     (f(24, 6), i(6, 24), 6, 2, True)],
        "gather": [(f(6, 12), 1, i(12, 6, 3)), (f(6, 12), 1, i(12, 2, 6)), (i(9, 36), 0, i(36, 6))],
        "index_select": [(x, 1, i(12, 6)), (f(36), 0, i(36, 6))],
        "scatter.value": [(f(6, 12), 1, i(12, 6, 3), 2.0), (f(6, 12), 1, i(12, 6, 3), 0)],
        "scatter.src": [(f(6, 12), 1, i(12, 6, 1), f(6, 1)), (f(6, 12), 1, i(12, 4, 1), f(6, 1))],
        "scatter_add": [(f(6, 12), 1, i(12, 6, 6), f(6, 6)), (f(36, 6), 0, i(36, 6, 6), f(6, 6))],
        "scatter_reduce.two": [(f(6, 12), 1, i(12, 6, 6), f(6, 6), "amax")],
        "index_reduce": [(x, 1, i(12, 6), f(6, 6, 4), "amax")],
        "index_add": [(x, 1, i(12, 6), f(6, 6, 4))],
        "index_fill.int_Scalar": [(x, 1, i(12, 6), 2.0)],
        "index_fill.int_Tensor": [(x, 1, i(12, 6), f())],
        "index_copy": [(x, 1, torch.tensor([3, 7, 11]), f(6, 3, 4))],
        "bucketize.Tensor": [(u(6, 12), torch.tensor([0.2, 0.5]).double())],
        "isin.Tensor_Tensor": [(i(9, 6, 12), i(9, 4))],
        "index.Tensor": [
            (f(12, 6), [i(12, 6)]), (f(6, 12), [i(6, 6, 1, 1), i(12, 1, 12, 1)]), (x, [None, i(12, 6) - 3]),
            (x, [i(6, 6), None, i(4, 6)]), (f(36, 6), [grid]), (i(9, 36), [i(36, 6)]), (x, [b(6)]),
            (b(6, 12), [i(6, 6, 1), i(12, 1, 12)]),
        ],
        "_unsafe_index.Tensor": [(f(12, 6), [i(12, 6)])],
        **alike(
            ("index_put", "_unsafe_index_put"),
            [
                (f(12, 6), [i(12, 18)], f(18, 6), True), (f(36, 6), [grid % 6], f(6, 12, 6), True),
                (x, [None, i(12, 6)], f(6, 4), True), (x, [i(6, 6), None, i(4, 6)], f(6, 1), True),
                (f(12, 6), [torch.tensor([3, 1, 8])], f(3, 6)), (f(6, 4), [b(6)], f(1)),
                (f(6, 12), [i(6, 6, 1), i(12, 1, 12)], f(), True), (i(9, 12), [i(12, 6)], i(9, 6), True),
            ],
        ),
        "kthvalue": [(x, 2, 1)],
        "aminmax": [(x, {"dim": 1})],
        # softmax
        "_log_softmax": [(x, 1, False), (x, -1, False)],
        "_softmax": [(x, 1, False), (x, 0, False)],
        "_safe_softmax": [(torch.where(b(6, 12), f(6, 12), float("-inf")) + torch.tensor([float("-inf")] + [0.0] * 5)
                           .view(6, 1), -1)],
        "_log_softmax_backward_data": [(x, aten._log_softmax(f(6, 12, 4), 1, False), 1, torch.float64)],
        "_softmax_backward_data": [(x, aten._softmax(f(6, 12, 4), 1, False), 1, torch.float64)],
        # norms
        "native_layer_norm": [(x, [4], f(4), f(4), 1e-5), (x, [12, 4], None, None, 1e-5)],
        "native_layer_norm_backward": [
            (x, f(6, 12, 4), [4], f(6, 12, 1), u(6, 12, 1), f(4), f(4), ALL),
            (x, f(6, 12, 4), [12, 4], f(6, 1, 1), u(6, 1, 1), None, None, [True, False, False]),
        ],
        **{
            f"_weight_norm_interface{backward}": [
                (*grad, f(6, 12), u(*g), *([u(*g)] if grad else []), dim) for dim, g in ((0, (6, 1)), (1, (1, 12)))
            ]
            for backward, grad in (("", []), ("_backward", [f(6, 12)]))
        },
        "_cdist_forward": [(f(6, 4), f(36, 4), 2.0, None), (f(6, 12, 4), f(6, 6, 4), 1.0, None)],
        "_cdist_backward": [
            (f(6, 12), f(6, 4), f(12, 4), 2.0, u(6, 12)), (f(6, 12, 6), f(6, 12, 4), f(6, 6, 4), 1.0, u(6, 12, 6)),
        ],
        "_fused_rms_norm": [(x, [4], f(4), 1e-5), (x, [4], None, None)],
        "native_group_norm": [(x, f(12), f(12), 6, 12, 4, 6, 1e-5), (X, None, None, 6, 12, 16, 1, 1e-5)],
        "native_group_norm_backward": [
            (f(6, 12, 4), x, *aten.native_group_norm(x, None, None, 6, 12, 4, 6, 1e-5)[1:], f(12), 6, 12, 4, 6, ALL),
            (f(6, 12, 4), x, *aten.native_group_norm(x, None, None, 6, 12, 4, 6, 1e-5)[1:], None, 6, 12, 4, 6,
             [True, False, False]),
        ],
        **alike(
            ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
            [(*NORM, True, 0.1, 1e-5), (*NORM, False, 0.1, 1e-5)],
        ),
        "_native_batch_norm_legit.no_stats": [(*NORM[:3], True, 0.1, 1e-5)],
        "_native_batch_norm_legit_no_training": [(*NORM, 0.1, 1e-5)],
        "_batch_norm_with_update_functional": [(*NORM, 0.1, 1e-5)],
        "_batch_norm_no_update": [(*NORM, 0.1, 1e-5)],
        "native_batch_norm_backward": [
            (f(6, 12, 4), x, u(12), *STATS, *aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[1:],
             True, 1e-5, ALL),
            (f(6, 12, 4), x, u(12), *STATS, f(0), f(0), False, 1e-5, ALL),
            (f(6, 12, 4), x, None, *STATS, *SAVED, True, 1e-5, [True, False, False]),
        ],
        # convolution
        "convolution": [
            (X, f(18, 12, 3, 3), f(18), *CONV, False, [0, 0], 1),
            (X, f(18, 12, 3, 3), None, *CONV, False, [0, 0], 1),
            (X, f(24, 1, 3, 3), f(24), *CONV, False, [0, 0], 12), (X, f(12, 18, 2, 2), f(18), [2, 2], [0, 0], [1, 1],
             True, [0, 0], 1), (X, f(12, 2, 2, 2), f(12), *CONV, True, [0, 0], 6),
        ],
        "convolution_backward": [
            (f(6, 18, 4, 4), X, f(18, 12, 3, 3), [18], *CONV, False, [0, 0], 1, ALL),
            (f(6, 18, 4, 4), X, f(18, 12, 3, 3), None, *CONV, False, [0, 0], 1, [False, True, False]),
            (f(6, 24, 4, 4), X, f(24, 1, 3, 3), [24], *CONV, False, [0, 0], 12, ALL),
            (f(6, 18, 8, 8), X, f(12, 18, 2, 2), [18], [2, 2], [0, 0], [1, 1], True, [0, 0], 1, ALL),
            (f(6, 12, 3, 3), X, f(12, 2, 2, 2), [12], [1, 1], [1, 1], [1, 1], True, [0, 0], 6, ALL),
        ],
        "im2col": [(X, [2, 2], [1, 1], [0, 0], [2, 2])],
        "col2im": [(f(6, 12, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2])],
        "grid_sampler_2d": [(X, f(6, 3, 3, 2), 0, 0, False)],
        "grid_sampler_3d": [(PLANES[3], f(6, 2, 2, 2, 3), 0, 0, False)],
        "grid_sampler_2d_backward": [(f(6, 12, 3, 3), X, f(6, 3, 3, 2), 0, 0, False, ALL[:2])],
        "grid_sampler_3d_backward": [(f(6, 12, 2, 2, 2), PLANES[3], f(6, 2, 2, 2, 3), 0, 0, False, ALL[:2])],
        "channel_shuffle": [(X, 3)],
        "pixel_shuffle": [(X, 2)],
        "pixel_unshuffle": [(X, 2)],
        "_fft_r2c": [(x, [1], 0, True)],
        "_fft_c2c": [(torch.complex(f(6, 12, 4), x), [0, 2], 0, True)],
        "_fft_c2r": [(torch.complex(f(6, 12, 4), x), [2], 0, 6)],
        # matrices
        **matrices(),
        # attention
        "_scaled_dot_product_flash_attention_for_cpu": [
            (Q, K, V), (Q, K, V, 0.0, True), (Q, K, V, {"attn_mask": MASK}),
            (Q, f(6, 6, 4, 2), f(6, 6, 4, 2)), (Q, K, V, {"attn_mask": f(6, 4)}),
        ],
        "_scaled_dot_product_flash_attention_for_cpu_backward": [
            _attention(False), _attention(True), _attention(False, mask=MASK),
        ],
    }  # fmt: skip

"""Fast paths: the same results as a plain expression, in less time on a CPU.

| fast path                                 | plain expression    | case                   | gain |
|-------------------------------------------|---------------------|------------------------|------|
| `additive.additive_weights`: shared by    | `log_sigma2.exp()`  | training step with 8   | 1.6  |
| the draws and the KL of a step            |                     | draws, 1 M weights     |      |
| `blocked_kl`: the KL in blocks            | `compiled_kl`       | KL and gradient of 1 M | 5.2  |
|                                           |                     | weights                |      |
| `blocked_kl.compiled_kl`: the gradient of | `log_uniform_kl` of | training step with     | 3.7  |
| the KL in a compiled graph                | every weight        | `kl_value_every`, 1 M  |      |
|                                           |                     | weights, compiled      |      |
| `normal_table.look_up`: normal numbers    | `torch.randn`       | 2^20 numbers           | 1.54 |

The gain is the time of the plain expression divided by the time of the fast path. Measured in
2026-11 with torch 2.13 on one thread: processor time, median of 9 interleaved rounds.
`reference()` switches all of them off.
"""

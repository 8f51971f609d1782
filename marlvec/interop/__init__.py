"""marlvec's envs as other libraries want them: one module per library, imported only by whoever asks for it.

`marlvec.interop.gymnasium` and `marlvec.interop.pettingzoo`.
"""

"""marlvec's envs as other libraries want them: one module per library, imported only by whoever asks for it.

`marlvec.interop.gymnasium`, `marlvec.interop.pettingzoo`, `marlvec.interop.torchrl` and `marlvec.interop.tianshou`.
"""

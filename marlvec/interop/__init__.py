"""marlvec's envs as other libraries want them: one module or folder per library, imported only where it is asked for.

`marlvec.interop.cleanrl`, `marlvec.interop.gymnasium`, `marlvec.interop.pettingzoo`, `marlvec.interop.pufferlib`,
`marlvec.interop.rllib`, `marlvec.interop.sb3`, `marlvec.interop.supersuit`, `marlvec.interop.tianshou`,
`marlvec.interop.torch` and `marlvec.interop.torchrl`.
"""

"""marlvec's envs for other libraries: one module or folder per library, imported only on use.

`marlvec.interop.cleanrl`, `marlvec.interop.gymnasium`, `marlvec.interop.pettingzoo`, `marlvec.interop.pufferlib`,
`marlvec.interop.rllib`, `marlvec.interop.sb3`, `marlvec.interop.supersuit`, `marlvec.interop.tianshou`,
`marlvec.interop.torch` and `marlvec.interop.torchrl`.
"""

"""marlvec's envs as other libraries want them: one module per library, imported only by whoever asks for it.

`marlvec.interop.aec`, `marlvec.interop.cleanrl`, `marlvec.interop.gymnasium`, `marlvec.interop.pettingzoo`,
`marlvec.interop.pufferlib`, `marlvec.interop.rllib`, `marlvec.interop.rllib_connector`, `marlvec.interop.rllib_env`,
`marlvec.interop.rllib_vector`, `marlvec.interop.sb3`, `marlvec.interop.sb3_decisions`, `marlvec.interop.supersuit`,
`marlvec.interop.tianshou` and `marlvec.interop.torchrl`. `marlvec.make` uses `marlvec.vector.pools.envpool_tasks`.
"""

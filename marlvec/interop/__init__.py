"""marlvec's envs as other libraries want them: one module per library, imported only by whoever asks for it.

`marlvec.interop.pettingzoo.aec`, `marlvec.interop.cleanrl`, `marlvec.interop.gymnasium`, `marlvec.interop.pettingzoo.parallel`,
`marlvec.interop.pufferlib`, `marlvec.interop.rllib.env_runner`, `marlvec.interop.rllib.connector`, `marlvec.interop.rllib.env`,
`marlvec.interop.rllib.vector_env`, `marlvec.interop.sb3.vec_env`, `marlvec.interop.sb3.decisions`, `marlvec.interop.supersuit`,
`marlvec.interop.tianshou` and `marlvec.interop.torchrl.env`. `marlvec.make` uses `marlvec.vector.pools.envpool_tasks`.
"""

"""PettingZoo's two APIs over marlvec's envs: `ParallelView` and `AECView`."""

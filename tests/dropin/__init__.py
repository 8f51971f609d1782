"""What other libraries' own tests of their vector envs expect, asked of marlvec's views of them.

One file a library. The facts are theirs, the code is not. Where marlvec differs on purpose, that is named at the top of
the file, and beside the line or in the test's name, under "here".
"""

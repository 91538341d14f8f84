"""The Triton kernels and their launchers. Imported where one is first launched, by the doors of
baton_kernels; nothing needs triton to import those."""

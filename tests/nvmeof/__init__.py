"""`make nvmeof-test`: the file tier and its preflight on real NVMe-oF, in a virtual machine.

`python -m tests.nvmeof` boots Debian's kernel in QEMU (no KVM needed). Its root is this machine's own file
system, read only, under a layer in memory, so Python and kvtier are those of the checkout. In the guest a
kernel target (nvmet-tcp) serves memory over the loopback, the kernel's host connects to it by two paths, and
`guest.py` runs what has to be true there. Not part of `make test`: needs packages, and some minutes.
"""

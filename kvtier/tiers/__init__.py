"""The media that blocks lie in, one module each: they store bytes and decide nothing.

`arena.py` is the DRAM tier (`leftovers.py`, `shortage.py` and `shm.py` belong to it), `file.py` the NVMe tier
(with `file_*.py`). `hbm.py` is device memory (`device*.py`), and `gds.py` (`cufile.py`) moves blocks
between it and files. Every tier passes `kvtier.testing.tier_tests.TierTests`.
"""

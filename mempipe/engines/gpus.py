"""GPUs as their makers' data sheets have them."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One type of GPU."""

    gib: float
    """Memory."""
    teraflops: float
    """Dense bfloat16 operations per second, in 1e12."""
    terabytes_per_second: float
    """To and from its memory."""
    link_gigabytes_per_second: float
    """To other GPUs of the node, in one direction."""

    @property
    def usable_gib(self) -> float:
        """Returns what CUDA reports: about 1 % less, 79.2 GiB on an H100 and 139.8 on an H200."""
        return 0.99 * self.gib


GPUS = {
    "A100": Gpu(gib=80, teraflops=312, terabytes_per_second=2.0, link_gigabytes_per_second=300),
    "L40S": Gpu(gib=48, teraflops=362, terabytes_per_second=0.86, link_gigabytes_per_second=32),
    "H20": Gpu(gib=96, teraflops=148, terabytes_per_second=4.0, link_gigabytes_per_second=450),
    "H100": Gpu(gib=80, teraflops=989, terabytes_per_second=3.35, link_gigabytes_per_second=450),
    "H200": Gpu(gib=141, teraflops=989, terabytes_per_second=4.8, link_gigabytes_per_second=450),
    "B200": Gpu(gib=180, teraflops=2250, terabytes_per_second=8.0, link_gigabytes_per_second=900),
}
"""By a word of the name that the driver reports."""

"""What programs run on: devices, what connects them, presets by name, and files.

    Machine.preset("h100:2x8")      by name
    Machine.detect()                of the devices at hand
    Machine.load("cluster.json")    of a file
    Machine(name, devices, network) of `Device`s, on `Level`s or a `Matrix` of links

`unity_jax.calibration` measures the devices at hand.
"""

from unity_jax.machine.device import Device
from unity_jax.machine.machine import Machine
from unity_jax.machine.network import Level, Matrix

__all__ = ["Device", "Level", "Machine", "Matrix"]

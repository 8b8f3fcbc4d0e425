"""The devices at hand, measured: small programs, how long they take, and the machine whose constants explain it.

calibrate().machine.save("profile.json")    # a `Calibration`: the machine, its samples, and a page of them
structure(jax.devices())                    # the machine before anything is measured
"""

from unity_jax.calibration.calibration import Calibration, calibrate, structure

__all__ = ["Calibration", "calibrate", "structure"]

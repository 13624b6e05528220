"""The simulated world: devices, ranks and data of sizes without bytes."""

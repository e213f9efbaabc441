"""Networks and LightningModules of the examples."""

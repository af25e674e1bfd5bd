"""Labels of Ray nodes by which we place. This module imports nothing: what starts a node reads it, too."""

POOL = "gammaray/pool"  # of the pods of one worker group
NODE, ISLAND = "gammaray/node", "gammaray/island"  # its own name; GPUs that NVLinks join

"""python -m fsdp_c: runs a script or a module with fsdp_c in the place of torch's fully_shard."""

import sys

from fsdp_c._install import _launch

if __name__ == "__main__":
    _launch.main(sys.argv[1:])

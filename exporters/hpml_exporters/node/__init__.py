"""The node as a whole: disks, file systems, networks, /dev/shm."""

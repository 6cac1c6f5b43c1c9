from mempipe.moved import find_moved_modules

find_moved_modules()

"""A live graph for a long time, under replayed load, random faults and workers that come and go: does it grow?"""

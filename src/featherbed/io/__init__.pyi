from featherbed.io.arrays import read_arrays as read_arrays
from featherbed.io.arrays import write_arrays as write_arrays
from featherbed.io.opening import find_data as find_data
from featherbed.io.opening import find_file as find_file
from featherbed.io.opening import open_compressed as open_compressed
from featherbed.io.opening import read_lines as read_lines

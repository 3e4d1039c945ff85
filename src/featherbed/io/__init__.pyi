from featherbed.io.opening import find_data as find_data
from featherbed.io.opening import find_file as find_file
from featherbed.io.opening import open_compressed as open_compressed
from featherbed.io.opening import read_lines as read_lines
from featherbed.io.vectors import read_matrix as read_matrix
from featherbed.io.vectors import read_weights as read_weights

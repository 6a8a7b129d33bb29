from zeropp.native.library import ADDRESS as ADDRESS
from zeropp.native.library import INT as INT
from zeropp.native.library import PACKAGE as PACKAGE
from zeropp.native.library import LibraryError as LibraryError
from zeropp.native.library import load as load
from zeropp.native.library import source_hash as source_hash

// The hash of the sources that a library was built from, which zeropp/native_library.py compares
// with the sources that are there. setup.py passes it to the compiler.

#ifndef ZPP_SOURCE_HASH
#error "build with setup.py, which defines ZPP_SOURCE_HASH"
#endif
#define ZPP_QUOTED(hash) #hash
#define ZPP_STRING(hash) ZPP_QUOTED(hash)

extern "C" const char* zpp_source_hash() { return ZPP_STRING(ZPP_SOURCE_HASH); }

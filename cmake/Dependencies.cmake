# SPDX-License-Identifier: Apache-2.0
#
# Everything here is optional for libtutti: what is missing is left out and named in the summary.
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(PkgConfig)

set(TUTTI_HAVE_HWLOC 0)
set(TUTTI_HAVE_SODIUM 0)
set(TUTTI_HAVE_DNNL 0)
set(TUTTI_HAVE_CBLAS 0)
option(TUTTI_OPTIONAL "Use optional packages where they are found" ON)
if(PkgConfig_FOUND AND TUTTI_OPTIONAL)
  pkg_check_modules(HWLOC IMPORTED_TARGET hwloc)
  if(HWLOC_FOUND)
    set(TUTTI_HAVE_HWLOC 1)
  endif()
  pkg_check_modules(SODIUM IMPORTED_TARGET libsodium)
  if(SODIUM_FOUND)
    set(TUTTI_HAVE_SODIUM 1)
  endif()
endif()

# A CBLAS for libtutti-tensor: OpenBLAS by preference.
find_path(CBLAS_INCLUDE_DIR cblas.h PATH_SUFFIXES openblas x86_64-linux-gnu aarch64-linux-gnu)
find_library(CBLAS_LIBRARY NAMES openblas cblas)
if(CBLAS_INCLUDE_DIR AND CBLAS_LIBRARY)
  set(TUTTI_HAVE_CBLAS 1)
endif()
if(TUTTI_OPTIONAL)
  find_path(DNNL_INCLUDE_DIR oneapi/dnnl/dnnl.h)
  find_library(DNNL_LIBRARY NAMES dnnl)
  if(DNNL_INCLUDE_DIR AND DNNL_LIBRARY)
    set(TUTTI_HAVE_DNNL 1)
  endif()
endif()

message(STATUS "hwloc: ${TUTTI_HAVE_HWLOC}, libsodium: ${TUTTI_HAVE_SODIUM}, CBLAS: ${TUTTI_HAVE_CBLAS}, oneDNN: ${TUTTI_HAVE_DNNL}")

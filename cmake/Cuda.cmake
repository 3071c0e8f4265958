# SPDX-License-Identifier: Apache-2.0
#
# Images of GPU kernels, for the architectures that are asked for:
#
#   TUTTI_CUDA_ARCHITECTURES   native (the default): the one of the GPU in this machine; 90 where there is none
#                              all: every generation that Tutti supports, for releases
#                              or a list of compute capabilities: 80;90
#
# Machine code is made for each of them, and PTX of the first and the last: what is newer than the first runs, with the
# driver compiling at load. A kernel that exists for one architecture only (sm_90a) belongs in a file of its own beside a
# plain one that does the same, and is built with tutti_cuda_image(… ARCHITECTURES 90a), which makes no PTX.
set(TUTTI_CUDA_ARCHITECTURES native CACHE STRING "Compute capabilities to build kernels for: native, all, or a list")
set(tutti_cuda_architectures ${TUTTI_CUDA_ARCHITECTURES})
if(TUTTI_CUDA_ARCHITECTURES STREQUAL "all")
  set(tutti_cuda_architectures 80 90 100)
elseif(TUTTI_CUDA_ARCHITECTURES STREQUAL "native")
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE capabilities ERROR_QUIET RESULT_VARIABLE status)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${capabilities}")
  string(REPLACE "." "" tutti_cuda_architectures "${capabilities}")
  list(REMOVE_DUPLICATES tutti_cuda_architectures)
  list(SORT tutti_cuda_architectures COMPARE NATURAL)
  if(NOT "${status}" STREQUAL "0" OR tutti_cuda_architectures STREQUAL "")
    set(tutti_cuda_architectures 90)
  endif()
endif()
message(STATUS "GPU architectures: ${tutti_cuda_architectures}")

# tutti_cuda_image(source image [ARCHITECTURES …] [flag…]): the fat binary of one .cu file. nvcc writes down what the file
# includes, so that it is built again when one of those changes, and by no other change of C code.
function(tutti_cuda_image source image)
  cmake_parse_arguments(given "" "" "ARCHITECTURES" ${ARGN})
  set(gencode "")
  if(given_ARCHITECTURES)
    foreach(architecture ${given_ARCHITECTURES})
      list(APPEND gencode -gencode arch=compute_${architecture},code=sm_${architecture})
    endforeach()
  else()
    list(GET tutti_cuda_architectures 0 first)
    list(GET tutti_cuda_architectures -1 last)
    foreach(architecture ${tutti_cuda_architectures})
      set(code sm_${architecture})
      if(architecture STREQUAL first OR architecture STREQUAL last)
        set(code [${code},compute_${architecture}])
      endif()
      list(APPEND gencode -gencode arch=compute_${architecture},code=${code})
    endforeach()
  endif()
  get_filename_component(source ${source} ABSOLUTE)
  get_filename_component(folder ${source} DIRECTORY)
  add_custom_command(OUTPUT ${image}
    COMMAND ${NVCC} -fatbin -O3 -std=c++17 --threads 0 ${given_UNPARSED_ARGUMENTS} -I${folder} -I${PROJECT_SOURCE_DIR}/src
            -I${PROJECT_SOURCE_DIR}/include ${gencode} -MD -MF ${image}.d ${source} -o ${image}
    DEPENDS ${source} DEPFILE ${image}.d VERBATIM COMMENT "Building GPU kernels of ${source}")
endfunction()

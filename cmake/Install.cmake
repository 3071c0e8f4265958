# SPDX-License-Identifier: Apache-2.0
#
# Installs the command, libraries, headers, plug-ins, the manual page, shell completion, documents, examples, the licence, pkg-config files and the
# CMake package. Target tutti_installed builds all of that and nothing more; target uninstall removes what the last install wrote.
include(CMakePackageConfigHelpers)

set(installed tutti_shared tutti_static)
set_target_properties(tutti_shared PROPERTIES EXPORT_NAME tutti)
if(TARGET tutti_tensor_shared)
  list(APPEND installed tutti_tensor_shared tutti_tensor_static)
  set_target_properties(tutti_tensor_shared PROPERTIES EXPORT_NAME tutti_tensor)
endif()
install(TARGETS ${installed} EXPORT TuttiTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS tutti_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
if(TUTTI_PLUGINS)
  install(TARGETS ${TUTTI_PLUGINS} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/tutti)
endif()
include(cmake/Ffi.cmake)
add_custom_target(tutti_installed DEPENDS ${installed} tutti_command tutti_ffi ${TUTTI_PLUGINS})

install(DIRECTORY include/tutti DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
set(documents ${CMAKE_INSTALL_DATAROOTDIR}/doc/tutti)
install(FILES LICENSE README.md CHANGELOG.md CONTRIBUTING.md DESTINATION ${documents})
install(DIRECTORY docs DESTINATION ${documents})
# Documents link to headers, which lie elsewhere when they are installed.
file(RELATIVE_PATH headers ${CMAKE_INSTALL_FULL_DATAROOTDIR}/doc/tutti ${CMAKE_INSTALL_FULL_INCLUDEDIR})
install(CODE "
  set(documents \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${documents}\")
  foreach(page README.md docs/README.md docs/collectives.md)
    file(READ \${documents}/\${page} text)
    string(REPLACE \"](include/\" \"](${headers}/\" text \"\${text}\")
    string(REPLACE \"](../include/\" \"](../${headers}/\" text \"\${text}\")
    file(WRITE \${documents}/\${page} \"\${text}\")
  endforeach()")
install(DIRECTORY examples DESTINATION ${documents} FILES_MATCHING PATTERN "*.c" PATTERN "*.py")
file(GLOB manuals CONFIGURE_DEPENDS man/*.1)
install(FILES ${manuals} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES tool/completion.bash DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/bash-completion/completions RENAME tutti)

# pkg-config: the prefix is found from the file's own folder, so that `cmake --install --prefix` and moved trees work.
#
# What a static link needs besides stands in Libs.private: the libraries of a package with all that they need in turn where that can be linked
# statically here, else only the package's own, as shared libraries (Debian's hwloc wants libudev, which has no archive); a wholly static program then
# needs a build with TUTTI_OPTIONAL=OFF. Not as Requires.private: pkg-config would ask for those packages of everybody who links with libtutti.so.
file(RELATIVE_PATH pc_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
set(pc_libs_private "")
include(CheckCSourceCompiles)
function(tutti_pc_package prefix)
  set(CMAKE_REQUIRED_LINK_OPTIONS -static)
  set(CMAKE_REQUIRED_LIBRARIES ${${prefix}_STATIC_LDFLAGS})
  check_c_source_compiles("int main(void) { return 0; }" ${prefix}_LINKS_STATICALLY)
  set(flags ${${prefix}_LDFLAGS})
  if(${prefix}_LINKS_STATICALLY)
    set(flags ${${prefix}_STATIC_LDFLAGS})
  endif()
  list(JOIN flags " " flags)
  set(pc_libs_private "${pc_libs_private} ${flags}" PARENT_SCOPE)
endfunction()
if(TUTTI_HAVE_HWLOC)
  tutti_pc_package(HWLOC)
endif()
if(TUTTI_HAVE_SODIUM)
  tutti_pc_package(SODIUM)
endif()
# "-lopenblas" of /usr/lib/x86_64-linux-gnu/libopenblas.so, so that the linker may take the archive beside it.
function(tutti_pc_library path variable)
  get_filename_component(folder ${path} DIRECTORY)
  get_filename_component(name ${path} NAME_WE)
  string(REGEX REPLACE "^lib" "-l" flags ${name})
  if(NOT folder IN_LIST CMAKE_C_IMPLICIT_LINK_DIRECTORIES)
    string(PREPEND flags "-L${folder} ")
  endif()
  set(${variable} "${${variable}} ${flags}" PARENT_SCOPE)
endfunction()
configure_file(cmake/tutti.pc.in tutti.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tutti.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(TARGET tutti_tensor_shared)
  set(pc_tensor_libs_private "")
  if(TUTTI_HAVE_CBLAS)
    tutti_pc_library(${CBLAS_LIBRARY} pc_tensor_libs_private)
  endif()
  if(TUTTI_HAVE_DNNL)
    tutti_pc_library(${DNNL_LIBRARY} pc_tensor_libs_private)
  endif()
  configure_file(cmake/tutti-tensor.pc.in tutti-tensor.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/tutti-tensor.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()

install(EXPORT TuttiTargets NAMESPACE Tutti:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Tutti)
configure_package_config_file(cmake/TuttiConfig.cmake.in TuttiConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Tutti)
write_basic_package_version_file(TuttiConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/TuttiConfig.cmake ${PROJECT_BINARY_DIR}/TuttiConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Tutti)

if(PROJECT_IS_TOP_LEVEL)
  add_custom_target(uninstall
    COMMAND ${CMAKE_COMMAND} -DMANIFEST=${PROJECT_BINARY_DIR}/install_manifest.txt -P ${PROJECT_SOURCE_DIR}/cmake/uninstall.cmake VERBATIM)
endif()

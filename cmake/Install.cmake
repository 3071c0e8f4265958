# SPDX-License-Identifier: Apache-2.0
#
# Installs the command, libraries, headers, plug-ins, man pages, pkg-config files and the CMake package.
include(CMakePackageConfigHelpers)

set(installed tutti_shared tutti_static)
if(TARGET tutti_tensor_shared)
  list(APPEND installed tutti_tensor_shared tutti_tensor_static)
endif()
set_target_properties(tutti_shared PROPERTIES EXPORT_NAME tutti)
install(TARGETS ${installed} EXPORT TuttiTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET tutti_tensor_shared)
  set_target_properties(tutti_tensor_shared PROPERTIES EXPORT_NAME tutti_tensor)
endif()
if(TARGET tutti_command)
  install(TARGETS tutti_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY include/tutti DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
file(GLOB manuals CONFIGURE_DEPENDS man/*.1)
install(FILES ${manuals} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
if(TUTTI_PLUGINS)
  install(TARGETS ${TUTTI_PLUGINS} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/tutti)
endif()

# pkg-config: the prefix is found from the file's own folder, so that `cmake --install --prefix` and moved trees work; and what a static link
# needs besides.
file(RELATIVE_PATH pc_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
# The optional ones by name, not as Requires.private: that would ask for everything that they in turn could be linked with statically.
set(pc_libs_private ${HWLOC_LDFLAGS} ${SODIUM_LDFLAGS})
list(JOIN pc_libs_private " " pc_libs_private)
set(pc_tensor_libs_private "")
if(TUTTI_HAVE_CBLAS)
  string(APPEND pc_tensor_libs_private " ${CBLAS_LIBRARY}")
endif()
if(TUTTI_HAVE_DNNL)
  string(APPEND pc_tensor_libs_private " ${DNNL_LIBRARY}")
endif()
configure_file(cmake/tutti.pc.in tutti.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tutti.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(TARGET tutti_tensor_shared)
  configure_file(cmake/tutti-tensor.pc.in tutti-tensor.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/tutti-tensor.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()

install(EXPORT TuttiTargets NAMESPACE Tutti:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Tutti)
configure_package_config_file(cmake/TuttiConfig.cmake.in TuttiConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Tutti)
write_basic_package_version_file(TuttiConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/TuttiConfig.cmake ${PROJECT_BINARY_DIR}/TuttiConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Tutti)

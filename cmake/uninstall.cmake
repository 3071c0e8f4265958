# SPDX-License-Identifier: Apache-2.0
#
# Removes the files that the last install wrote (${MANIFEST}), then the folders that are empty without them and are Tutti's own: those with its name
# in their path below the prefix. DESTDIR counts as it did for the install.
if(NOT EXISTS ${MANIFEST})
  message(FATAL_ERROR "nothing was installed from this build folder: there is no ${MANIFEST}")
endif()
file(STRINGS ${MANIFEST} files)
set(folders "")
foreach(file ${files})
  file(REMOVE "$ENV{DESTDIR}${file}")
  get_filename_component(folder ${file} DIRECTORY)
  while(folder MATCHES "/(tutti|Tutti)(/|$)")
    list(APPEND folders ${folder})
    get_filename_component(folder ${folder} DIRECTORY)
  endwhile()
endforeach()
list(REMOVE_DUPLICATES folders)
list(SORT folders ORDER DESCENDING) # the inner ones first
foreach(folder ${folders})
  file(GLOB left "$ENV{DESTDIR}${folder}/*")
  if(NOT left AND IS_DIRECTORY "$ENV{DESTDIR}${folder}")
    file(REMOVE_RECURSE "$ENV{DESTDIR}${folder}")
  endif()
endforeach()
list(LENGTH files count)
message(STATUS "${count} files removed")
file(REMOVE ${MANIFEST})

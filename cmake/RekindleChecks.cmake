# What the structure of the tree promises, checked: the direction of includes at configure time, and
# that each header compiles alone (target rekindle_headers, which tools/clang-check goes through, too).

# The allowed direction of includes between top-level directories:
#   src <- transport <- recovery <- tools,   proto <- transport, recovery,   tests -> all.
# The few src/ files that read or write a protobuf format may include proto/, too.
function(rekindle_check_layering)
  set(allowed_src src proto)
  set(allowed_transport src proto transport)
  set(allowed_recovery src proto transport recovery)
  set(allowed_tools src proto transport recovery tools)
  foreach(top src transport recovery tools)
    file(GLOB_RECURSE files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${top}/*.h ${CMAKE_SOURCE_DIR}/${top}/*.cc)
    foreach(file IN LISTS files)
      file(STRINGS ${file} includes REGEX "^#include \"")
      foreach(line IN LISTS includes)
        string(REGEX REPLACE "^#include \"([a-z]+)/.*" "\\1" used "${line}")
        if(NOT used IN_LIST allowed_${top})
          message(SEND_ERROR "layering: ${file} must not include from ${used}/ (${line}); allowed: ${allowed_${top}}")
        endif()
      endforeach()
    endforeach()
  endforeach()
  # Backends see the transport's interfaces, never each other.
  foreach(backend tcp shm verbs)
    file(GLOB_RECURSE files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/transport/${backend}/*.h
         ${CMAKE_SOURCE_DIR}/transport/${backend}/*.cc)
    foreach(file IN LISTS files)
      file(STRINGS ${file} includes REGEX "^#include \"transport/(tcp|shm|verbs)/")
      foreach(line IN LISTS includes)
        if(NOT line MATCHES "transport/${backend}/")
          message(SEND_ERROR "layering: ${file}: a backend must not include another (${line})")
        endif()
      endforeach()
    endforeach()
  endforeach()
  # Pure modules know neither sockets, nor the real clock, nor protobuf.
  file(GLOB pure CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/recovery/agent/core/*.h ${CMAKE_SOURCE_DIR}/recovery/agent/core/*.cc
       ${CMAKE_SOURCE_DIR}/recovery/planner/*.h ${CMAKE_SOURCE_DIR}/recovery/planner/*.cc
       ${CMAKE_SOURCE_DIR}/recovery/coordinator/core/*.h ${CMAKE_SOURCE_DIR}/recovery/coordinator/core/*.cc
       ${CMAKE_SOURCE_DIR}/recovery/swarm/*.h ${CMAKE_SOURCE_DIR}/recovery/swarm/*.cc
       ${CMAKE_SOURCE_DIR}/recovery/pull/pull_policy.* ${CMAKE_SOURCE_DIR}/recovery/pull/source_plan.*
       ${CMAKE_SOURCE_DIR}/recovery/worker/core/*.h ${CMAKE_SOURCE_DIR}/recovery/worker/core/*.cc
       ${CMAKE_SOURCE_DIR}/recovery/device/device_ledger.* ${CMAKE_SOURCE_DIR}/recovery/device/device_life.*
       ${CMAKE_SOURCE_DIR}/transport/schedule/*.h ${CMAKE_SOURCE_DIR}/transport/schedule/*.cc)
  foreach(file IN LISTS pure)
    file(STRINGS ${file} bad
         REGEX "boost/asio|steady_now|steady_clock::now|system_clock::now|<sys/socket|#include \"proto/")
    if(bad)
      message(SEND_ERROR "layering: ${file} is a pure module: ${bad}")
    endif()
  endforeach()
endfunction()

# One source per header that includes it twice and nothing else. Not part of `all`.
function(rekindle_check_headers)
  if(NOT REKINDLE_TESTS)
    return()
  endif()
  set(sources)
  foreach(top src transport recovery tools tests)
    file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/${top}/*.h)
    if(NOT REKINDLE_HAVE_CUDA)
      list(FILTER headers EXCLUDE REGEX "/cuda/")
    endif()
    foreach(header IN LISTS headers)
      set(source ${CMAKE_BINARY_DIR}/headers/${header}.cc)
      file(CONFIGURE OUTPUT ${source} CONTENT "#include \"@header@\"\n#include \"@header@\"\n" @ONLY)
      list(APPEND sources ${source})
    endforeach()
  endforeach()
  add_library(rekindle_headers OBJECT EXCLUDE_FROM_ALL ${sources})
  set_target_properties(rekindle_headers PROPERTIES UNITY_BUILD OFF)
  target_compile_options(rekindle_headers PRIVATE -O0 -g0)
  target_link_libraries(rekindle_headers PRIVATE rekindle_flags GTest::gmock)
  # Every library's own dependencies, for their include directories.
  get_property(libraries GLOBAL PROPERTY REKINDLE_LIBRARIES)
  target_link_libraries(rekindle_headers PRIVATE ${libraries} rekindle::proto)
  if(REKINDLE_FUZZ)
    target_compile_options(rekindle_headers PRIVATE -fno-sanitize=all)
  endif()
endfunction()

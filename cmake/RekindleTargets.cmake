# rekindle_library(NAME SOURCES ... [PUBLIC ...] [PRIVATE ...]): one static library per directory.
# rekindle_test(NAME LABELS ... SOURCES ... DEPS ...): one GoogleTest program; each test is a ctest.

function(rekindle_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  if(ARG_SOURCES)
    add_library(rekindle_${name} STATIC ${ARG_SOURCES})
    target_link_libraries(rekindle_${name} PUBLIC ${ARG_PUBLIC} PRIVATE rekindle_flags ${ARG_PRIVATE})
    target_include_directories(rekindle_${name} PUBLIC $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}>
                                                       $<BUILD_INTERFACE:${CMAKE_BINARY_DIR}>)
  else()
    add_library(rekindle_${name} INTERFACE)
    target_link_libraries(rekindle_${name} INTERFACE ${ARG_PUBLIC})
    target_include_directories(rekindle_${name} INTERFACE $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}>)
  endif()
  add_library(rekindle::${name} ALIAS rekindle_${name})
endfunction()

include(GoogleTest)
function(rekindle_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "LABELS;SOURCES;DEPS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE rekindle_flags ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  gtest_discover_tests(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
                       DISCOVERY_MODE PRE_TEST)
endfunction()

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
  foreach(backend tcp shm fake verbs)
    file(GLOB files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/transport/${backend}/*.h
         ${CMAKE_SOURCE_DIR}/transport/${backend}/*.cc)
    foreach(file IN LISTS files)
      file(STRINGS ${file} includes REGEX "^#include \"transport/(tcp|shm|fake|verbs)/")
      foreach(line IN LISTS includes)
        if(NOT line MATCHES "transport/${backend}/")
          message(SEND_ERROR "layering: ${file}: a backend must not include another (${line})")
        endif()
      endforeach()
    endforeach()
  endforeach()
  # Pure modules know neither sockets nor the real clock.
  file(GLOB pure CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/recovery/planner/*.h ${CMAKE_SOURCE_DIR}/recovery/planner/*.cc
       ${CMAKE_SOURCE_DIR}/recovery/coordinator/core/*.h ${CMAKE_SOURCE_DIR}/recovery/coordinator/core/*.cc
       ${CMAKE_SOURCE_DIR}/transport/scheduler*.h ${CMAKE_SOURCE_DIR}/transport/scheduler*.cc)
  foreach(file IN LISTS pure)
    file(STRINGS ${file} bad REGEX "boost/asio|steady_clock::now|system_clock::now|<sys/socket")
    if(bad)
      message(SEND_ERROR "layering: ${file} is a pure module: ${bad}")
    endif()
  endforeach()
endfunction()

# Precompiled headers. Reading headers is half of a build's time, so libraries share cmake/precompiled.h, and test
# programs share it with GoogleTest. One provider of each kind compiles it; a user needs the same flags as its provider.

function(rekindle_precompiled_provider name kind)
  set(source ${CMAKE_BINARY_DIR}/precompiled/${name}.cc)
  file(CONFIGURE OUTPUT ${source} CONTENT "int main() { return 0; }\n")
  if(kind STREQUAL LIBRARY)
    add_library(${name} STATIC EXCLUDE_FROM_ALL ${source})
  else()
    add_executable(${name} EXCLUDE_FROM_ALL ${source})
  endif()
  target_link_libraries(${name} PRIVATE rekindle_flags Boost::headers fmt::fmt protobuf::libprotobuf tl::expected
                                        Threads::Threads ${ARGN})
  target_precompile_headers(${name} PRIVATE ${CMAKE_SOURCE_DIR}/cmake/precompiled.h)
endfunction()

rekindle_precompiled_provider(rekindle_precompiled LIBRARY)
if(REKINDLE_UNOPTIMISED)
  rekindle_precompiled_provider(rekindle_precompiled_unoptimised LIBRARY)
  target_compile_options(rekindle_precompiled_unoptimised PRIVATE -O0)
endif()
if(REKINDLE_TESTS)
  rekindle_precompiled_provider(rekindle_precompiled_test EXECUTABLE GTest::gmock GTest::gtest)
  target_precompile_headers(rekindle_precompiled_test PRIVATE <gtest/gtest.h> <gmock/gmock.h>)
  target_compile_options(rekindle_precompiled_test PRIVATE ${REKINDLE_TEST_OPTIONS})
endif()

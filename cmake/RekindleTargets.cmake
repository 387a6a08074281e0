# rekindle_library(NAME SOURCES ... [PUBLIC ...] [PRIVATE ...]): one static library per directory.
# rekindle_test(NAME LABELS ... SOURCES ... DEPS ...): one GoogleTest program. With the label `unit` the program is one
# ctest; else each of its tests is. PREFIX: before their names, where two programs have the same tests.

function(rekindle_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  if(ARG_SOURCES)
    add_library(rekindle_${name} STATIC ${ARG_SOURCES})
    target_link_libraries(rekindle_${name} PUBLIC ${ARG_PUBLIC}
                          PRIVATE $<BUILD_INTERFACE:rekindle_flags> ${ARG_PRIVATE})
    if(name IN_LIST REKINDLE_UNOPTIMISED)
      target_compile_options(rekindle_${name} PRIVATE -O0)
      target_precompile_headers(rekindle_${name} REUSE_FROM rekindle_precompiled_unoptimised)
    else()
      target_precompile_headers(rekindle_${name} REUSE_FROM rekindle_precompiled)
    endif()
    set(scope PUBLIC)
  else()
    add_library(rekindle_${name} INTERFACE)
    target_link_libraries(rekindle_${name} INTERFACE ${ARG_PUBLIC})
    set(scope INTERFACE)
  endif()
  target_include_directories(
    rekindle_${name} ${scope} $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}>
                              $<BUILD_INTERFACE:${CMAKE_BINARY_DIR}>
                              $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/rekindle>)
  add_library(rekindle::${name} ALIAS rekindle_${name})
  set_property(GLOBAL APPEND PROPERTY REKINDLE_LIBRARIES rekindle::${name})
endfunction()

include(GoogleTest)
function(rekindle_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT;PREFIX" "LABELS;SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE rekindle_flags ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  get_directory_property(options COMPILE_OPTIONS)
  if("${options}" STREQUAL "${REKINDLE_TEST_DIRECTORY_OPTIONS}")
    target_precompile_headers(${name} REUSE_FROM rekindle_precompiled_test)
  endif()
  if("unit" IN_LIST ARG_LABELS)
    set(timeout 600)
  elseif(ARG_TIMEOUT)
    set(timeout ${ARG_TIMEOUT})
  else()
    set(timeout 120)
  endif()
  if(REKINDLE_SANITIZE)
    math(EXPR timeout "3 * ${timeout}")  # not optimised
  endif()
  if("unit" IN_LIST ARG_LABELS)
    # One process for all of them: starting a process for each took longer than the tests. A program that was not
    # built has no label, as with gtest_discover_tests().
    set(script ${CMAKE_CURRENT_BINARY_DIR}/${name}.cmake)
    file(GENERATE OUTPUT ${script} CONTENT "\
if(EXISTS \"$<TARGET_FILE:${name}>\")
  add_test(${name} \"$<TARGET_FILE:${name}>\" --gtest_brief=1 \"--gtest_output=xml:${CMAKE_BINARY_DIR}/results/${name}.xml\")
  set_tests_properties(${name} PROPERTIES LABELS \"${ARG_LABELS}\" TIMEOUT ${timeout} WORKING_DIRECTORY \"${CMAKE_CURRENT_BINARY_DIR}\")
else()
  add_test(${name}_NOT_BUILT ${name}_NOT_BUILT)
endif()
")
    set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${script})
  else()
    gtest_discover_tests(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${timeout}
                         TEST_PREFIX "${ARG_PREFIX}" DISCOVERY_MODE PRE_TEST)
  endif()
endfunction()

# rekindle_fuzzer(NAME SOURCES ... DEPS ...): a libFuzzer program (preset asan only), run for
# REKINDLE_FUZZ_SECONDS on tests/fuzz/corpus/NAME, which is kept; what it finds stays in the build.
# With the same REKINDLE_FUZZ_SEED it tries the same inputs; 0 takes another seed each time.
add_custom_target(rekindle_fuzzers)
function(rekindle_fuzzer name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  if(NOT REKINDLE_FUZZ)
    return()
  endif()
  add_executable(fuzz_${name} EXCLUDE_FROM_ALL ${ARG_SOURCES})
  target_link_libraries(fuzz_${name} PRIVATE rekindle_flags ${ARG_DEPS})
  target_compile_options(fuzz_${name} PRIVATE -fsanitize=fuzzer-no-link)
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
  # Coverage where it guides the fuzzer, and nowhere else: it makes all tests slower.
  set(ours ${ARG_DEPS})
  list(FILTER ours INCLUDE REGEX "^rekindle::")
  foreach(library IN LISTS ours)
    string(REPLACE "::" "_" target ${library})
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
    # The precompiled headers were compiled without it.
    set_target_properties(${target} PROPERTIES DISABLE_PRECOMPILE_HEADERS ON)
  endforeach()
  add_dependencies(rekindle_fuzzers fuzz_${name})
  set(work ${CMAKE_CURRENT_BINARY_DIR}/${name})
  file(MAKE_DIRECTORY ${work}/corpus ${work}/findings)
  add_test(NAME fuzz.${name}
           COMMAND fuzz_${name} -max_total_time=${REKINDLE_FUZZ_SECONDS} -seed=${REKINDLE_FUZZ_SEED}
                   -timeout=10 -rss_limit_mb=2048 -print_final_stats=1
                   -artifact_prefix=${work}/findings/ ${work}/corpus
                   ${CMAKE_SOURCE_DIR}/tests/fuzz/corpus/${name})
  set_tests_properties(fuzz.${name} PROPERTIES LABELS fuzz TIMEOUT 300)
endfunction()

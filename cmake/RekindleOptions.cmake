# Options, build types, warnings and sanitizers.
option(REKINDLE_WERROR "Treat compiler warnings as errors" OFF)
option(REKINDLE_FUZZ "Build the libFuzzer targets (clang only)" OFF)
option(REKINDLE_TESTS "Build the tests" ON)
set(REKINDLE_FUZZ_SECONDS 10 CACHE STRING "How long each libFuzzer target runs as a test")
set(REKINDLE_FUZZ_SEED 1 CACHE STRING "Seed of the libFuzzer targets; 0 for another one each time")
set(REKINDLE_SANITIZE "" CACHE STRING "Sanitizers to build with, e.g. address,undefined or thread")
set(REKINDLE_CUDA AUTO CACHE STRING "GPU support: AUTO, ON or OFF")
set(REKINDLE_VERBS AUTO CACHE STRING "RDMA support: AUTO, ON or OFF")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1 -DNDEBUG")
set(CMAKE_CXX_FLAGS_DEV "-O1 -g1")
set(CMAKE_C_FLAGS_DEV ${CMAKE_CXX_FLAGS_DEV})
# With AddressSanitizer, tests and libraries that neither hash nor plan take longer to optimise than it saves.
set(REKINDLE_UNOPTIMISED)
set(REKINDLE_TEST_OPTIONS)
if(REKINDLE_SANITIZE MATCHES address)
  set(REKINDLE_TEST_OPTIONS -O0)
  set(REKINDLE_UNOPTIMISED agent bench cli client device device_process proto pull rpc worker)
endif()

# More than half of each of the 120 test programs would be debug information.
add_link_options(-Wl,--compress-debug-sections=zlib)

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  # Hits across clones and worktrees: paths are hashed relative to the source directory.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE_PROGRAM})
endif()

# Without these, ccache cannot use what it has of sources with precompiled headers.
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
else()
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-Xclang -fno-pch-timestamp>")
endif()

# Hardening, for programs that read what strangers send. Sanitizers check more, and do not work with some of it. What
# the compiler adds costs time to build and to run, so only builds for users have it, but for stack protectors: the tests
# of packages look for them in what they built.
if(NOT REKINDLE_SANITIZE AND NOT REKINDLE_FUZZ)
  include(CheckPIESupported)
  check_pie_supported()
  add_link_options(-Wl,-z,relro,-z,now,-z,noexecstack)
  add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-fstack-protector-strong>)
  set(hardening -fstack-clash-protection)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-fcf-protection=full REKINDLE_HAVE_CF_PROTECTION)
  if(REKINDLE_HAVE_CF_PROTECTION)
    list(APPEND hardening -fcf-protection=full)
  endif()
  foreach(flag IN LISTS hardening)
    add_compile_options("$<$<AND:$<CONFIG:RelWithDebInfo>,$<COMPILE_LANGUAGE:C,CXX>>:${flag}>")
  endforeach()
  # Some compilers define it already, with another value.
  add_compile_options("$<$<AND:$<CONFIG:RelWithDebInfo>,$<COMPILE_LANGUAGE:C,CXX>>:SHELL:-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3>")
endif()

add_library(rekindle_flags INTERFACE)
target_include_directories(
  rekindle_flags INTERFACE $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}>
                           $<BUILD_INTERFACE:${CMAKE_BINARY_DIR}>)
target_compile_options(rekindle_flags INTERFACE -pthread -Wall -Wextra -Wconversion -Wshadow
                                                -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # g++ 12 inlines Asio's operator new of a coroutine frame, but not its operator delete, and warns.
  target_compile_options(rekindle_flags INTERFACE -Wno-mismatched-new-delete)
  # In a unity build every source is an included file, and g++ warns of local types in its coroutines' frames.
  target_compile_options(rekindle_flags INTERFACE -Wno-subobject-linkage)
endif()
if(REKINDLE_WERROR)
  target_compile_options(rekindle_flags INTERFACE -Werror)
endif()
# Generated code takes the sanitizers, but not the warnings.
add_library(rekindle_sanitize INTERFACE)
target_link_libraries(rekindle_flags INTERFACE rekindle_sanitize)
if(REKINDLE_SANITIZE)
  target_compile_options(rekindle_sanitize INTERFACE -fsanitize=${REKINDLE_SANITIZE}
                                                     -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(rekindle_sanitize INTERFACE -fsanitize=${REKINDLE_SANITIZE})
  # The 120 programs are large with a sanitizer, and lld links them in a quarter of ld's time.
  include(CheckLinkerFlag)
  check_linker_flag(CXX -fuse-ld=lld REKINDLE_HAVE_LLD)
  if(REKINDLE_HAVE_LLD)
    target_link_options(rekindle_sanitize INTERFACE -fuse-ld=lld)
  endif()
  if(REKINDLE_SANITIZE MATCHES address)
    # Asio uses freed blocks again by itself, and ASan does not see who still has them.
    target_compile_definitions(rekindle_sanitize INTERFACE BOOST_ASIO_RECYCLING_ALLOCATOR_CACHE_SIZE=0)
  endif()
  if(REKINDLE_SANITIZE MATCHES undefined)
    # A third of the build's time; ASan finds null pointers, too.
    target_compile_options(rekindle_sanitize INTERFACE -fno-sanitize=vptr,null)
  endif()
  if(REKINDLE_SANITIZE MATCHES thread AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    # g++ warns that it cannot see atomic_thread_fence under TSan (Asio uses it).
    target_compile_options(rekindle_sanitize INTERFACE -Wno-tsan)
  endif()
endif()
if(REKINDLE_FUZZ AND NOT CMAKE_CXX_COMPILER_ID STREQUAL Clang)
  message(FATAL_ERROR "REKINDLE_FUZZ needs clang (preset asan)")
endif()

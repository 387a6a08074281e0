# `cmake --install`: the command with its completion and an example worker; librekindle with rekindle.h for workers (CMake
# target `rekindle::client`, pkg-config `librekindle`); and the static libraries with their headers
# for programs that embed an agent (CMake package `rekindle`, pkg-config `rekindle`).
include(CMakePackageConfigHelpers)

function(rekindle_install)
  if(REKINDLE_SANITIZE OR REKINDLE_FUZZ)
    return()
  endif()
  # Lower layers first, as they were added; the command's own parts stay here.
  get_property(libraries GLOBAL PROPERTY REKINDLE_LIBRARIES)
  list(REMOVE_ITEM libraries rekindle::cli rekindle::bench)
  list(PREPEND libraries rekindle::proto)
  set(targets)
  set(link_flags "")
  foreach(library IN LISTS libraries)
    string(REPLACE "::" "_" target ${library})
    string(REPLACE "rekindle::" "" name ${library})
    set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
    list(APPEND targets ${target})
    string(PREPEND link_flags "-l${target} ")  # users before what they use
  endforeach()

  set(REKINDLE_PC_VERBS "")
  if(REKINDLE_HAVE_VERBS)
    set(REKINDLE_PC_VERBS " libibverbs")
  endif()

  set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/rekindle)
  # The component `runtime` is what a machine needs that compiles nothing against the libraries.
  install(TARGETS rekindle RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime)
  install(TARGETS example_worker RUNTIME DESTINATION ${CMAKE_INSTALL_LIBEXECDIR}/rekindle COMPONENT runtime)
  install(TARGETS ${targets} EXPORT rekindle ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(TARGETS rekindle_client EXPORT rekindle LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime)
  install(FILES ${CMAKE_SOURCE_DIR}/src/client/rekindle.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT runtime)
  install(FILES ${CMAKE_SOURCE_DIR}/src/client/example/worker.c
          DESTINATION ${CMAKE_INSTALL_DATADIR}/rekindle/examples COMPONENT runtime)
  install(EXPORT rekindle NAMESPACE rekindle:: FILE rekindle-targets.cmake DESTINATION ${package_dir})
  foreach(top src transport recovery)
    install(DIRECTORY ${CMAKE_SOURCE_DIR}/${top}/
            DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/rekindle/${top}
            FILES_MATCHING PATTERN "*.h" PATTERN "client" EXCLUDE)
  endforeach()
  install(DIRECTORY ${CMAKE_BINARY_DIR}/proto/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/rekindle/proto
          FILES_MATCHING PATTERN "*.pb.h" PATTERN "CMakeFiles" EXCLUDE)

  configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/rekindle-config.cmake.in
                                ${CMAKE_BINARY_DIR}/rekindle-config.cmake
                                INSTALL_DESTINATION ${package_dir}
                                PATH_VARS CMAKE_INSTALL_BINDIR)
  write_basic_package_version_file(${CMAKE_BINARY_DIR}/rekindle-config-version.cmake
                                   COMPATIBILITY SameMinorVersion)
  install(FILES ${CMAKE_BINARY_DIR}/rekindle-config.cmake
                ${CMAKE_BINARY_DIR}/rekindle-config-version.cmake DESTINATION ${package_dir})

  set(REKINDLE_LINK_FLAGS "${link_flags}")
  # Relative to the file itself: the tree may be moved.
  file(RELATIVE_PATH REKINDLE_PREFIX_FROM_PC ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
  configure_file(${CMAKE_SOURCE_DIR}/cmake/rekindle.pc.in ${CMAKE_BINARY_DIR}/rekindle.pc @ONLY)
  configure_file(${CMAKE_SOURCE_DIR}/cmake/librekindle.pc.in ${CMAKE_BINARY_DIR}/librekindle.pc @ONLY)
  install(FILES ${CMAKE_BINARY_DIR}/rekindle.pc ${CMAKE_BINARY_DIR}/librekindle.pc
          DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

  # Completion scripts and manual pages, which the command makes of itself.
  set(made ${CMAKE_BINARY_DIR}/made)
  add_custom_command(OUTPUT ${made}/man/rekindle.1
                     COMMAND ${CMAKE_COMMAND} -E rm -rf ${made}
                     COMMAND ${CMAKE_COMMAND} -E make_directory ${made}/man
                     COMMAND rekindle completion bash > ${made}/rekindle
                     COMMAND rekindle completion zsh > ${made}/_rekindle
                     COMMAND rekindle completion fish > ${made}/rekindle.fish
                     COMMAND rekindle man --to ${made}/man
                     DEPENDS rekindle VERBATIM)
  # What `cmake --install` needs, without the tests: of the component `runtime`, and of all.
  add_custom_target(rekindle_runtime ALL DEPENDS ${made}/man/rekindle.1)
  add_dependencies(rekindle_runtime rekindle rekindle_client example_worker)
  add_custom_target(rekindle_installed ALL)
  add_dependencies(rekindle_installed rekindle_runtime ${targets})
  install(FILES ${made}/rekindle DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions COMPONENT runtime)
  install(FILES ${made}/_rekindle DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions COMPONENT runtime)
  install(FILES ${made}/rekindle.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT runtime)
  install(DIRECTORY ${made}/man/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT runtime)
  install(FILES ${CMAKE_SOURCE_DIR}/LICENSE ${CMAKE_SOURCE_DIR}/README.md
          DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT runtime)
endfunction()

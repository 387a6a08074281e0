#pragma once

#include <span>
#include <string_view>

namespace rekindle::coordinator {

// A file of recovery/coordinator/page, compiled into the program (cmake/embed_files.cmake).
struct PageFile {
  std::string_view name;
  std::string_view content;
  // Differs for other contents.
  std::string_view digest;
};
std::span<const PageFile> page_files();

}  // namespace rekindle::coordinator

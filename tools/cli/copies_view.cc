#include "tools/cli/copies_view.h"

#include "src/base/units.h"

namespace rekindle::cli {

Json to_json(const proto::CopyStatus& copy) {
  return {{"model", copy.id().model()},    {"version", copy.id().version()},
          {"directory", copy.directory()}, {"bytes", copy.bytes()},
          {"state", copy.state()},         {"read_unix_us", copy.read_unix_us()},
          {"found", copy.found()}};
}

std::string copies_text(const std::vector<proto::CopyStatus>& copies) {
  if (copies.empty()) return {};
  std::vector<std::vector<std::string>> rows;
  std::string found;
  for (const auto& copy : copies) {
    const std::string name =
        printable(fmt::format("{}@{}", copy.id().model(), copy.id().version()));
    const std::string read = copy.read_unix_us() == 0 ? "-" : utc_time(copy.read_unix_us());
    rows.push_back(
        {name, copy.state(), format_bytes(copy.bytes()), read, printable(copy.directory())});
    if (!copy.found().empty()) found += fmt::format("{}: {}\n", name, printable(copy.found()));
  }
  return "\n" +
         table({{"COPY"}, {"BYTES ARE"}, {"BYTES", true}, {"LAST READ"}, {"DIRECTORY"}}, rows) +
         found;
}

}  // namespace rekindle::cli

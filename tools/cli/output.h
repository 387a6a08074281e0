#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "recovery/agent/host.h"
#include "src/base/result.h"

namespace rekindle::cli {

using Json = nlohmann::ordered_json;

// Results go to stdout, everything else to stderr. Text that came from elsewhere (file names,
// tensor names, messages of peers) is made printable first: no control characters reach the
// terminal.
void print(std::string_view text);
void print_line(std::string_view line);
void print_json(const Json& value);  // one document, indented on a terminal
std::string printable(std::string_view text);
std::string utc_time(std::uint64_t unix_us);  // 2026-11-21T20:31:04.123456Z

// kInternal when stdout could not take all that was written (full disk); a closed pipe is no error.
Result<void> flush_output();

// Columns padded to their widest cell; the last one is not padded. `right`: aligned right.
struct Column {
  std::string title;
  bool right = false;
};
std::string table(const std::vector<Column>& columns,
                  const std::vector<std::vector<std::string>>& rows);

bool terminal(int fd);
std::size_t terminal_width(int fd);  // 80 when it is none

Json to_json(const agent::TransferSummary& summary);
Json to_json(const agent::PlanSummary& plan);
Json to_json(const Error& error);
std::string describe_sources(const std::vector<agent::SourceLine>& sources);

}  // namespace rekindle::cli

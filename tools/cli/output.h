#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "recovery/pull/pull_types.h"
#include "src/base/result.h"
#include "src/tensor/version_signature.h"

namespace rekindle::cli {

using Json = nlohmann::ordered_json;

// Results go to stdout, everything else to stderr. Text from elsewhere (file names, tensor names,
// messages of peers) is made printable first, so that no control characters reach the terminal.
void print(std::string_view text);
void print_line(std::string_view line);
// One document, indented on a terminal.
void print_json(const Json& value);
// One document on one line.
void print_json_line(const Json& value);
// The result of a command, in the form that the user wants.
void print_result(bool json, const Json& value, std::string_view text);
std::string printable(std::string_view text);
// 2026-11-21T20:31:04.123456Z.
std::string utc_time(std::uint64_t unix_us);

// kInternal: stdout did not take all of the output (a full disk). A closed pipe is not an error.
Result<void> flush_output();

// Columns padded to their widest cell; the last one is not padded. `right`: aligned right.
struct Column {
  std::string title;
  bool right = false;
};
std::string table(const std::vector<Column>& columns,
                  const std::vector<std::vector<std::string>>& rows);

bool terminal(int fd);
// 80 when it is not a terminal.
std::size_t terminal_width(int fd);

// The ids of the keys.
Json signers_json(std::span<const VersionSignature> signatures);
// "  signed by 1a2b3c4d"; nothing without signatures.
void print_signers(std::span<const VersionSignature> signatures);
Json to_json(const pull::TransferSummary& summary);
Json to_json(const pull::PlanSummary& plan);
Json to_json(const Error& error);
std::string describe_sources(const std::vector<pull::SourceLine>& sources);

}  // namespace rekindle::cli

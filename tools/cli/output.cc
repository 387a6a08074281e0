#include "tools/cli/output.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include <sys/ioctl.h>
#include <unistd.h>

#include <time.h>

#include "src/base/units.h"
#include "src/tensor/canonical.h"

namespace rekindle::cli {
namespace {

// The bytes at the beginning of a text that a terminal would not show but act upon: control
// characters, and those that end a line or turn its direction. 0: it shows the first one.
std::size_t acting_bytes(std::string_view text, bool is_utf8) {
  const auto byte = [&](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  if (byte(0) < 0x20 || byte(0) == 0x7f || (byte(0) >= 0x80 && !is_utf8)) return 1;
  // U+0080 to U+009F.
  if (byte(0) == 0xc2 && byte(1) < 0xa0) return 2;
  if (byte(0) != 0xe2) return 0;
  // U+200E, U+200F, U+2028 to U+202E, U+2066 to U+2069.
  const bool marks = byte(1) == 0x80 && (byte(2) == 0x8e || byte(2) == 0x8f);
  const bool turns = byte(1) == 0x80 && byte(2) >= 0xa8 && byte(2) <= 0xae;
  const bool isolates = byte(1) == 0x81 && byte(2) >= 0xa6 && byte(2) <= 0xa9;
  return marks || turns || isolates ? 3 : 0;
}

}  // namespace

void print(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stdout); }

void print_line(std::string_view line) {
  print(line);
  print("\n");
}

void print_json(const Json& value) {
  print_line(
      value.dump(terminal(STDOUT_FILENO) ? 2 : -1, ' ', false, Json::error_handler_t::replace));
}

void print_json_line(const Json& value) {
  print_line(value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

void print_result(bool json, const Json& value, std::string_view text) {
  if (json) {
    print_json(value);
  } else {
    print(text);
  }
}

std::string printable(std::string_view text) {
  const bool utf8 = canonical::is_utf8(text);
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const std::size_t acting = acting_bytes(text, utf8);
    for (const char c : text.substr(0, acting)) {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    }
    if (acting == 0) result += text.front();
    text.remove_prefix(std::max<std::size_t>(acting, 1));
  }
  return result;
}

std::string utc_time(std::uint64_t unix_us) {
  const auto whole = static_cast<time_t>(unix_us / 1'000'000);
  tm parts{};
  ::gmtime_r(&whole, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:06}Z", parts.tm_year + 1900,
                     parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
                     unix_us % 1'000'000);
}

Result<void> flush_output() {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return {};
  if (errno == EPIPE) return {};
  return fail_errno(errno == 0 ? EIO : errno, "write to standard output");
}

std::string table(const std::vector<Column>& columns,
                  const std::vector<std::vector<std::string>>& rows) {
  // Columns of UTF-8 text are as wide as their code points; close enough for names.
  const auto width_of = [](std::string_view text) {
    return static_cast<std::size_t>(
        std::ranges::count_if(text, [](char c) { return (c & 0xc0) != 0x80; }));
  };
  std::vector<std::size_t> widths;
  for (const Column& column : columns) widths.push_back(width_of(column.title));
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width_of(row[i]));
  }
  std::string text;
  const auto add_row = [&](const auto& cell) {
    std::string line;
    for (std::size_t i = 0; i < columns.size(); ++i) {
      const std::string& value = cell(i);
      const std::string padding(widths[i] - width_of(value), ' ');
      if (i > 0) line += "  ";
      if (columns[i].right) line += padding;
      line += value;
      if (!columns[i].right) line += padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  add_row([&](std::size_t i) -> const std::string& { return columns[i].title; });
  for (const auto& row : rows) {
    add_row([&](std::size_t i) -> const std::string& { return row[i]; });
  }
  return text;
}

bool terminal(int fd) { return ::isatty(fd) == 1; }

std::size_t terminal_width(int fd) {
  constexpr std::size_t kDefault = 80;
  winsize size{};
  if (::ioctl(fd, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kDefault;
  return size.ws_col;
}

namespace {

Json sources_json(const std::vector<pull::SourceLine>& sources) {
  Json result = Json::array();
  for (const pull::SourceLine& source : sources) {
    result.push_back({{"name", source.name},
                      {"transport", source.transport},
                      {"bytes", source.bytes},
                      {"bytes_per_second", source.bytes_per_second},
                      {"lost", source.lost},
                      {"cause", source.cause}});
  }
  return result;
}

}  // namespace

Json signers_json(std::span<const VersionSignature> signatures) {
  Json ids = Json::array();
  for (const auto& one : signatures) ids.push_back(crypto::key_id(one.public_key));
  return ids;
}

void print_signers(std::span<const VersionSignature> signatures) {
  if (!signatures.empty()) print_line("  signed by " + describe_signers(signatures));
}

Json to_json(const pull::TransferSummary& summary) {
  Json phases = Json::object();
  for (const pull::Phase& phase : summary.phases) {
    phases[phase.name] = static_cast<double>(phase.elapsed.count()) / 1e3;
  }
  const double elapsed = std::chrono::duration<double>(summary.elapsed).count();
  return {{"model", summary.id.model},
          {"version", summary.id.version},
          {"root", summary.root.hex()},
          {"layout", summary.layout.hex()},
          {"path", summary.path.string()},
          {"tensors", summary.tensors},
          {"bytes", summary.bytes},
          {"fetched_bytes", summary.fetched_bytes},
          {"resumed_bytes", summary.resumed_bytes},
          {"refetched_bytes", summary.refetched_bytes},
          {"elapsed_ms", summary.elapsed.count()},
          {"bytes_per_second", elapsed > 0 ? static_cast<double>(summary.bytes) / elapsed : 0.0},
          {"phases_ms", phases},
          {"signers", signers_json(summary.signatures)},
          {"left_out", summary.left_out},
          {"sources", sources_json(summary.sources)}};
}

Json to_json(const pull::PlanSummary& plan) {
  Json sources = Json::array();
  for (const auto& source : plan.sources) {
    sources.push_back({{"name", source.name},
                       {"endpoint", source.endpoint},
                       {"bytes_available", source.bytes_available}});
  }
  Json wanted = Json::array();
  for (const auto& tensor : plan.wanted) {
    wanted.push_back({{"name", tensor.name},
                      {"dtype", tensor.dtype},
                      {"shape", tensor.shape},
                      {"box", tensor.box},
                      {"bytes", tensor.bytes}});
  }
  return {{"model", plan.id.model},
          {"version", plan.id.version},
          {"root", plan.root.hex()},
          {"tensors", plan.tensors},
          {"wanted_bytes", plan.wanted_bytes},
          {"wire_bytes", plan.wire_bytes},
          {"slices", plan.slices},
          {"buckets", plan.buckets},
          {"complete", plan.missing_total == 0},
          {"sources", sources},
          {"missing_total", plan.missing_total},
          {"missing", plan.missing},
          {"wanted_total", plan.wanted_total},
          {"wanted", wanted}};
}

Json to_json(const Error& error) {
  return {{"error", {{"code", to_string(error.code())}, {"message", error.message()}}}};
}

std::string describe_sources(const std::vector<pull::SourceLine>& sources) {
  std::string text;
  for (const pull::SourceLine& source : sources) {
    if (!text.empty()) text += ", ";
    text += printable(source.name);
    if (!source.transport.empty()) text += fmt::format(" {}", source.transport);
    if (source.bytes > 0) text += fmt::format(" {}", format_bytes(source.bytes));
    if (source.lost) {
      text +=
          source.cause.empty() ? " (lost)" : fmt::format(" (lost: {})", printable(source.cause));
    }
  }
  return text;
}

}  // namespace rekindle::cli

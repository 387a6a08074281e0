#include "transport/verbs/host/hca_filter.h"

#include <algorithm>
#include <charconv>

namespace rekindle::transport::verbs {

namespace {

constexpr std::string_view kHowTo =
    "write NAME[:PORT],… with ^ before the list to exclude and = "
    "for whole names";

bool is_name(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  });
}

}  // namespace

Result<HcaFilter::Entry> HcaFilter::parse_entry(std::string_view text, std::string_view whole) {
  Entry entry;
  const auto colon = text.find(':');
  entry.name = text.substr(0, colon);
  if (!is_name(entry.name)) {
    return fail(ErrorCode::kInvalid, "--hca '{}': '{}' names no device; {}", whole, text, kHowTo);
  }
  if (colon == std::string_view::npos) return entry;
  const std::string_view port = text.substr(colon + 1);
  const char* const last = port.data() + port.size();
  const auto [end, error] = std::from_chars(port.data(), last, entry.port);
  if (error != std::errc() || end != last || entry.port < 1 || entry.port > 255) {
    return fail(ErrorCode::kInvalid, "--hca '{}': '{}' is no port (1 to 255) of {}; {}", whole,
                port, entry.name, kHowTo);
  }
  return entry;
}

Result<HcaFilter> HcaFilter::parse(std::string_view text) {
  HcaFilter filter;
  filter.text_ = text;
  if (text.empty()) return filter;
  std::string_view rest = text;
  filter.exclude_ = rest.starts_with('^');
  if (filter.exclude_) rest.remove_prefix(1);
  filter.exact_ = rest.starts_with('=');
  if (filter.exact_) rest.remove_prefix(1);
  while (true) {
    const auto comma = rest.find(',');
    TRY(Entry entry, parse_entry(rest.substr(0, comma), text));
    filter.entries_.push_back(std::move(entry));
    if (comma == std::string_view::npos) return filter;
    rest.remove_prefix(comma + 1);
  }
}

bool HcaFilter::names(const Entry& entry, std::string_view device) const {
  return exact_ ? device == entry.name : device.starts_with(entry.name);
}

bool HcaFilter::allows(std::string_view device, std::uint8_t port) const {
  if (entries_.empty()) return true;
  const bool listed = std::ranges::any_of(entries_, [&](const Entry& entry) {
    return names(entry, device) && (entry.port == kAnyPort || entry.port == port);
  });
  return listed != exclude_;
}

bool HcaFilter::may_allow(std::string_view device) const {
  if (entries_.empty()) return true;
  return exclude_ != std::ranges::any_of(entries_, [&](const Entry& entry) {
           return names(entry, device) && (!exclude_ || entry.port == kAnyPort);
         });
}

}  // namespace rekindle::transport::verbs

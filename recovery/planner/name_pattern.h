#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"

namespace rekindle::planner {

// A pattern of tensor names, matched from end to end:
//   *            any characters but '.', at least one
//   **           any characters, at least one
//   {layer}      a decimal number, the layer; {expert} likewise; {n} any number
//   {a|b|}       one of these texts; an empty one is allowed
// Everything else stands for itself. docs/reference/shard-specs.md.
class Pattern {
 public:
  struct Match {
    std::optional<std::uint64_t> layer;
    std::optional<std::uint64_t> expert;
  };

  static Result<Pattern> parse(std::string_view text);
  std::optional<Match> match(std::string_view name) const;
  const std::string& text() const { return text_; }
  bool has_layer() const { return has_layer_; }
  bool has_expert() const { return has_expert_; }

 private:
  enum class Token { kText, kWord, kAny, kNumber, kLayer, kExpert, kChoice };
  struct Part {
    Token token = Token::kText;
    std::vector<std::string> texts;  // kText: one; kChoice: several
  };

  Result<void> parse_braces(std::string_view inside);
  bool match_from(std::size_t part, std::string_view rest, Match& found, int& budget) const;
  bool match_number(std::size_t part, std::string_view rest, Match& found, int& budget) const;
  bool match_wildcard(std::size_t part, std::string_view rest, Match& found, int& budget) const;

  std::string text_;
  std::vector<Part> parts_;
  bool has_layer_ = false;
  bool has_expert_ = false;
};

}  // namespace rekindle::planner

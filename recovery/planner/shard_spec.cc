#include "recovery/planner/shard_spec.h"

#include <algorithm>
#include <charconv>

#include <fmt/format.h>
#include <re2/re2.h>

#include "recovery/planner/rule_applier.h"
#include "src/base/strict_json.h"

namespace rekindle::planner {

namespace {

constexpr std::size_t kMaxSpecBytes = 1 << 20;
constexpr int kMaxSpecDepth = 8;
constexpr std::size_t kMaxRules = 1000;
constexpr std::size_t kMaxRegexBytes = 1024;
constexpr std::int64_t kMaxRegexMemory = 8 << 20;

using Rule = ShardSpec::Rule;

// A rule and what its pattern found in the name.
struct Choice {
  const Rule* rule = nullptr;
  Pattern::Match match;
};

Choice choose(std::span<const Rule> rules, std::string_view name) {
  for (const Rule& rule : rules) {
    for (const Pattern& pattern : rule.patterns) {
      if (const auto match = pattern.match(name)) return {&rule, *match};
    }
  }
  return {};
}

Failure unnamed(const std::string& spec, const TensorInfo& tensor) {
  for (const char* packed : {".qweight", ".qzeros", ".g_idx", ".scales"}) {
    if (tensor.name.ends_with(packed)) {
      return fail(
          ErrorCode::kInvalid,
          "shard spec {}: tensor '{}' is packed (GPTQ or AWQ) and no rule names it: how it "
          "splits depends on its packing, so name it in a spec of your own, or pull it whole",
          spec, tensor.name);
    }
  }
  return fail(ErrorCode::kInvalid,
              "shard spec {}: no rule names tensor '{}' {}: add one "
              "(docs/reference/shard-specs.md), or pull "
              "it whole",
              spec, tensor.name, tensor.shape.to_string());
}

// "a.b.scale" and "weight" give "a.b.weight".
std::string sibling(std::string_view name, std::string_view last) {
  const auto dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string(last)
                                       : fmt::format("{}.{}", name.substr(0, dot), last);
}

class BoxMaker {
 public:
  BoxMaker(const std::string& spec, std::span<const Rule> rules, const TensorSet& tensors,
           const RuleApplier& applier)
      : spec_(spec), rules_(rules), tensors_(tensors), applier_(applier), used_(rules.size()) {}

  Result<std::vector<TensorBox>> run() {
    std::vector<TensorBox> boxes;
    std::vector<Box> own;
    for (TensorIndex tensor = 0; tensor < tensors_.size(); ++tensor) {
      own.clear();
      if (is_file_tensor(tensors_[tensor].name)) {
        own.push_back(Box::whole(tensors_[tensor].shape));
      } else {
        TRY_VOID(add(tensor, own));
      }
      std::sort(own.begin(), own.end());
      for (const Box& box : own) boxes.push_back({tensor, box});
    }
    for (const Rule& rule : rules_) {
      if (rule.optional || used_[index_of(rule)]) continue;
      return fail(ErrorCode::kInvalid,
                  "shard spec {}: {} matches no tensor of this checkpoint (that no rule before it "
                  "took): correct it, or mark it \"optional\": true",
                  spec_, rule.label);
    }
    return boxes;
  }

 private:
  std::size_t index_of(const Rule& rule) const {
    return static_cast<std::size_t>(&rule - rules_.data());
  }

  Result<void> add(TensorIndex tensor, std::vector<Box>& out) {
    const TensorInfo& info = tensors_[tensor];
    const Choice choice = choose(rules_, info.name);
    if (choice.rule == nullptr) return unnamed(spec_, info);
    used_[index_of(*choice.rule)] = true;
    if (choice.rule->kind == Rule::Kind::kScale) return add_scale(*choice.rule, tensor, out);
    auto done = applier_.apply(*choice.rule, choice.match, tensor, out);
    if (!done) return fail(in_spec(std::move(done).error()));
    return {};
  }

  Result<void> add_scale(const Rule& rule, TensorIndex scale, std::vector<Box>& out) {
    const std::string name = sibling(tensors_[scale].name, rule.of);
    const auto weight = tensors_.find(name);
    const Choice choice = weight ? choose(rules_, name) : Choice{};
    if (choice.rule == nullptr || choice.rule->kind == Rule::Kind::kScale) {
      return fail(ErrorCode::kInvalid, "shard spec {}: {}: tensor '{}' scales '{}', which {}",
                  spec_, rule.label, tensors_[scale].name, name,
                  weight ? "no rule splits" : "is not in the checkpoint");
    }
    std::vector<Box> boxes;
    auto done = applier_.apply(*choice.rule, choice.match, *weight, boxes);
    if (done) done = applier_.apply_scale(rule, scale, *weight, boxes, out);
    if (!done) return fail(in_spec(std::move(done).error()));
    return {};
  }

  Error in_spec(Error error) const {
    return std::move(error).with_context(fmt::format("shard spec {}", spec_));
  }

  const std::string& spec_;
  std::span<const Rule> rules_;
  const TensorSet& tensors_;
  const RuleApplier& applier_;
  std::vector<bool> used_;
};

}  // namespace

Result<ShardSpec> ShardSpec::parse(std::string_view text) { return one_line(parse_rules(text)); }

Result<ShardSpec> ShardSpec::parse_rules(std::string_view text) {
  TRY(const nlohmann::json json,
      parse_strict_json(text, "shard spec", kMaxSpecBytes, kMaxSpecDepth));
  const auto bad = [](std::string_view why) {
    return fail(ErrorCode::kInvalid, "shard spec: {}", why);
  };
  if (!json.is_object()) return bad("not a JSON object with 'name' and 'rules'");
  for (const auto& [key, value] : json.items()) {
    if (key != "name" && key != "rules" && key != "comment") {
      return bad(fmt::format("there is no field {}", nlohmann::json(key).dump()));
    }
  }
  const auto name = json.find("name");
  if (name == json.end() || !name->is_string() || name->get_ref<const std::string&>().empty() ||
      name->get_ref<const std::string&>().size() > 100) {
    return bad("'name' must be a text of 1 to 100 bytes");
  }
  const auto rules = json.find("rules");
  if (rules == json.end() || !rules->is_array() || rules->empty() || rules->size() > kMaxRules) {
    return bad(fmt::format("'rules' must be a list of 1 to {} rules", kMaxRules));
  }
  ShardSpec spec;
  spec.name_ = nlohmann::json(*name).dump();  // quoted, control characters escaped
  auto parsed = std::make_shared<std::vector<Rule>>();
  for (const nlohmann::json& rule : *rules) {
    auto one = parse_rule(rule, parsed->size() + 1);
    if (!one) {
      return fail(std::move(one).error().with_context(fmt::format("shard spec {}", spec.name_)));
    }
    parsed->push_back(std::move(*one));
  }
  spec.rules_ = std::move(parsed);
  return spec;
}

Result<ShardSpec> ShardSpec::builtin(std::string_view config_json) {
  TRY(const ModelConfig config, one_line(ModelConfig::parse(config_json)));
  const std::string type = config.text("model_type");
  const std::string text = builtin_spec(type);
  if (!text.empty()) return parse(text);
  return fail(one_line(
      Error(ErrorCode::kNotFound,
            fmt::format(
                "there is no built-in shard spec for model_type '{}' (there are: {}): give a file "
                "with --spec, or pull whole tensors",
                type.substr(0, 100), fmt::join(builtin_model_types(), ", ")))));
}

Result<std::vector<TensorBox>> ShardSpec::boxes(const TensorSet& tensors,
                                                std::string_view config_json,
                                                const ShardPlace& place) const {
  TRY(const ModelConfig config, one_line(ModelConfig::parse(config_json)));
  RuleApplier applier(tensors, config, place);
  TRY_VOID(one_line(applier.prepare()));
  return one_line(BoxMaker(name_, *rules_, tensors, applier).run());
}

namespace {

Result<std::vector<TensorBox>> match_names(const TensorSet& tensors, std::string_view regex) {
  if (regex.size() > kMaxRegexBytes) {
    return fail(ErrorCode::kInvalid, "a tensor expression of {} bytes, the most accepted is {}",
                regex.size(), kMaxRegexBytes);
  }
  // RE2: its time is linear in the name's length, whatever the expression.
  RE2::Options options(RE2::Quiet);
  options.set_max_mem(kMaxRegexMemory);
  const RE2 expression(re2::StringPiece(regex.data(), regex.size()), options);
  if (!expression.ok()) {
    return fail(ErrorCode::kInvalid, "'{}' is no regular expression that can be used: {}", regex,
                expression.error());
  }
  std::vector<TensorBox> boxes;
  bool any = false;
  for (TensorIndex tensor = 0; tensor < tensors.size(); ++tensor) {
    const TensorInfo& info = tensors[tensor];
    const bool file = is_file_tensor(info.name);
    if (!file && !RE2::PartialMatch(info.name, expression)) continue;
    any = any || !file;
    boxes.push_back({tensor, Box::whole(info.shape)});
  }
  if (!any) return fail(ErrorCode::kNotFound, "no tensor name matches '{}'", regex);
  return boxes;
}

}  // namespace

Result<std::vector<TensorBox>> boxes_matching(const TensorSet& tensors, std::string_view regex) {
  return one_line(match_names(tensors, regex));
}

std::vector<TensorBox> whole_boxes(const TensorSet& tensors) {
  std::vector<TensorBox> boxes;
  boxes.reserve(tensors.size());
  for (TensorIndex tensor = 0; tensor < tensors.size(); ++tensor) {
    boxes.push_back({tensor, Box::whole(tensors[tensor].shape)});
  }
  return boxes;
}

namespace {

constexpr std::uint32_t kMaxAxis = 1 << 16;

bool parse_number(std::string_view text, std::uint32_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

Result<ShardPlace> parse_place(std::string_view text) {
  const auto bad = [&](std::string_view why) {
    return fail(ErrorCode::kInvalid,
                "shard '{}': {}; write tp=RANK/SIZE, pp=… or ep=…, e.g. tp=3/8", text, why);
  };
  ShardPlace place;
  std::string seen;
  std::string_view rest = text;
  while (true) {
    const auto comma = rest.find(',');
    const std::string_view one = rest.substr(0, comma);
    const auto equals = one.find('=');
    const auto slash = one.find('/');
    if (equals == std::string_view::npos || slash == std::string_view::npos || slash < equals) {
      return bad(fmt::format("'{}' is not AXIS=RANK/SIZE", one));
    }
    const std::string_view name = one.substr(0, equals);
    ShardPlace::Axis* axis = name == "tp" ? &place.tp : name == "pp" ? &place.pp : &place.ep;
    if (axis == &place.ep && name != "ep") return bad(fmt::format("there is no axis '{}'", name));
    const std::string mark = fmt::format("{} ", name);
    if (seen.find(mark) != std::string::npos) return bad(fmt::format("{} is given twice", name));
    seen += mark;
    if (!parse_number(one.substr(equals + 1, slash - equals - 1), axis->rank) ||
        !parse_number(one.substr(slash + 1), axis->size)) {
      return bad(fmt::format("'{}' is not AXIS=RANK/SIZE", one));
    }
    if (axis->size == 0 || axis->size > kMaxAxis) {
      return bad(fmt::format("{} must have 1 to {} ranks", name, kMaxAxis));
    }
    if (axis->rank >= axis->size) {
      return bad(fmt::format("ranks of {} count from 0 to {}", name, axis->size - 1));
    }
    if (comma == std::string_view::npos) return place;
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace

Result<ShardPlace> ShardPlace::parse(std::string_view text) { return one_line(parse_place(text)); }

std::string ShardPlace::to_string() const {
  std::string text;
  const auto add = [&](std::string_view name, const Axis& axis) {
    if (axis.size == 1) return;
    text += fmt::format("{}{}={}/{}", text.empty() ? "" : ",", name, axis.rank, axis.size);
  };
  add("tp", tp);
  add("pp", pp);
  add("ep", ep);
  return text.empty() ? "tp=0/1" : text;
}

}  // namespace rekindle::planner

#include "recovery/trace/otlp_json.h"

#include <nlohmann/json.hpp>

#include "src/base/version.h"

namespace rekindle::trace {

namespace {

using Json = nlohmann::ordered_json;

// The numbers of OTLP's enumerations.
constexpr int kKindInternal = 1;
constexpr int kStatusError = 2;

Json text_attribute(const std::string& key, const std::string& text) {
  return {{"key", key}, {"value", {{"stringValue", text}}}};
}

Json to_json(const Attribute& attribute) {
  if (const auto* text = std::get_if<std::string>(&attribute.value)) {
    return text_attribute(attribute.key, *text);
  }
  // Numbers of 64 bits are strings in protobuf's JSON.
  const auto number = std::to_string(std::get<std::int64_t>(attribute.value));
  return {{"key", attribute.key}, {"value", {{"intValue", number}}}};
}

Json to_json(const Span& span) {
  Json json{{"traceId", span.context.trace.hex()}, {"spanId", span.context.span.hex()}};
  if (!span.parent.is_nil()) json["parentSpanId"] = span.parent.hex();
  json["name"] = span.name;
  json["kind"] = kKindInternal;
  json["startTimeUnixNano"] = std::to_string(span.start.count());
  json["endTimeUnixNano"] = std::to_string(span.end().count());
  json["attributes"] = Json::array();
  for (const Attribute& attribute : span.attributes) {
    json["attributes"].push_back(to_json(attribute));
  }
  if (!span.error.empty()) json["status"] = {{"code", kStatusError}, {"message", span.error}};
  return json;
}

}  // namespace

std::string to_otlp_json(std::span<const Span> spans) {
  Json list = Json::array();
  for (const Span& span : spans) list.push_back(to_json(span));
  Json resource = Json::array();
  if (!spans.empty()) {
    resource.push_back(text_attribute("service.name", "rekindle-" + spans[0].service));
    resource.push_back(text_attribute("service.instance.id", spans[0].node));
  }
  const Json scope{{"name", "rekindle"}, {"version", std::string(version())}};
  Json scoped = Json::array();
  scoped.push_back({{"scope", scope}, {"spans", std::move(list)}});
  Json of_process{{"resource", {{"attributes", std::move(resource)}}},
                  {"scopeSpans", std::move(scoped)}};
  Json body;
  body["resourceSpans"] = Json::array();
  body["resourceSpans"].push_back(std::move(of_process));
  return body.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace rekindle::trace

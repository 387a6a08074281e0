#pragma once

#include <string>

#include <protozero/pbf_reader.hpp>

// What the readers of protobuf frames without libprotobuf have in common.
namespace rekindle::pbf {

inline constexpr auto kVarint = protozero::pbf_wire_type::varint;
inline constexpr auto kBytes = protozero::pbf_wire_type::length_delimited;

inline std::string text(protozero::pbf_reader& in) {
  const protozero::data_view view = in.get_view();
  return {view.data(), view.size()};
}

}  // namespace rekindle::pbf

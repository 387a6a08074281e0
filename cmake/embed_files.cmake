# cmake -DOUT=page_files.cc -DDIRECTORY=… -DNAMES=a.html,b.js -P embed_files.cmake: a source with the files' bytes.
string(REPLACE "," ";" NAMES "${NAMES}")
set(arrays "")
set(rows "")
set(number 0)
foreach(name IN LISTS NAMES)
  file(READ ${DIRECTORY}/${name} bytes HEX)
  file(SHA256 ${DIRECTORY}/${name} digest)
  string(SUBSTRING ${digest} 0 16 digest)
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," bytes "${bytes}")
  string(APPEND arrays "constexpr char kFile${number}[] = {${bytes}};\n")
  string(APPEND rows "    {\"${name}\", {kFile${number}, sizeof kFile${number}}, \"${digest}\"},\n")
  math(EXPR number "${number} + 1")
endforeach()
file(WRITE ${OUT} "#include \"recovery/coordinator/page_files.h\"

namespace rekindle::coordinator {

namespace {

${arrays}
constexpr PageFile kFiles[] = {
${rows}};

}  // namespace

std::span<const PageFile> page_files() { return kFiles; }

}  // namespace rekindle::coordinator
")

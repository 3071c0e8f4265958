/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for NVRTC, as a library libnvrtc.so.13: it builds the text for the CPU with the C++ compiler of the build,
 * and what the stand-in driver loads is that library. TEST_NVRTC_FAILS=1 makes it fail as a compiler does.
 */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <unistd.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

struct program {
    std::string text, image, messages;
};

static std::string contents_of(const std::string &path) {
    std::string all;
    char part[4096];
    FILE *from = fopen(path.c_str(), "rb");
    for (size_t bytes; from != nullptr && (bytes = fread(part, 1, sizeof part, from)) > 0;)
        all.append(part, bytes);
    if (from != nullptr)
        fclose(from);
    return all;
}

EXPORTED int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 99; /* what it makes is for no GPU */
    return 0;
}
EXPORTED int nvrtcCreateProgram(program **made, const char *text, const char *, int, const char *const *,
                                const char *const *) {
    *made = new program{ text, "", "" };
    return 0;
}
EXPORTED int nvrtcDestroyProgram(program **made) {
    delete *made;
    *made = nullptr;
    return 0;
}
EXPORTED int nvrtcCompileProgram(program *own, int, const char *const *) {
    char folder[] = "/tmp/tutti-standin-XXXXXX";
    const char *fails = getenv("TEST_NVRTC_FAILS");
    if (mkdtemp(folder) == nullptr)
        return 1;
    std::string base = std::string(folder) + "/loops", command;
    FILE *to = fopen((base + ".cpp").c_str(), "w");
    if (to != nullptr) {
        fprintf(to, "#include \"%s/loops.hpp\"\n%s%s", STANDIN_FOLDER, fails != nullptr ? "an error;\n" : "",
                own->text.c_str());
        fclose(to);
    }
    command =
        std::string(STANDIN_COMPILER) +
        " -std=c++17 -O1 -ffp-contract=off -fwrapv -fno-strict-aliasing -w -fvisibility=hidden -fPIC -shared -o '" +
        base + ".so' '" + base + ".cpp' >'" + base + ".log' 2>&1";
    int status = system(command.c_str());
    own->image = status == 0 ? contents_of(base + ".so") : "";
    own->messages = contents_of(base + ".log");
    for (const char *end : { ".cpp", ".so", ".log" })
        unlink((base + end).c_str());
    rmdir(folder);
    return status == 0 ? 0 : 6; /* NVRTC_ERROR_COMPILATION */
}
EXPORTED int nvrtcGetCUBINSize(program *own, size_t *bytes) {
    *bytes = own->image.size();
    return 0;
}
EXPORTED int nvrtcGetCUBIN(program *own, char *image) {
    memcpy(image, own->image.data(), own->image.size());
    return 0;
}
EXPORTED int nvrtcGetProgramLogSize(program *own, size_t *bytes) {
    *bytes = own->messages.size() + 1;
    return 0;
}
EXPORTED int nvrtcGetProgramLog(program *own, char *text) {
    memcpy(text, own->messages.c_str(), own->messages.size() + 1);
    return 0;
}

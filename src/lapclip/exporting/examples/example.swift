// How well some captions fit an image, with Core ML:
//
//     swift example.swift image.jpg
//
// The captions are those of examples.json, which holds their tokens. For captions of your own, tokenizer.json can be read
// by the package Tokenizers of https://github.com/huggingface/swift-transformers. This file is an example: take what you
// need. In an app, add the two .mlpackage folders to the target and Xcode compiles them.

import CoreGraphics
import CoreML
import Foundation
import ImageIO

struct About: Decodable {
    struct Preprocessing: Decodable { let side: Int; let resized: Int; let resize: String }
    struct Tower: Decodable { let file: String; let input: String; let output: String }
    struct Captions: Decodable { let longest: Int; let padding: Int32 }
    let preprocessing: Preprocessing
    let towers: [String: Tower]
    let tokenizer: Captions
}

struct Example: Decodable { let caption: String; let symbols: [Int32] }

let here = URL(fileURLWithPath: #filePath).deletingLastPathComponent()

func read<Contents: Decodable>(_ name: String) throws -> Contents {
    try JSONDecoder().decode(Contents.self, from: Data(contentsOf: here.appendingPathComponent(name)))
}

/// The middle of an image as the model sees it; colours become sRGB. The model scales them itself.
func middleSquare(_ path: String, _ about: About.Preprocessing) throws -> CVPixelBuffer {
    let options = [
        kCGImageSourceCreateThumbnailFromImageAlways: true, kCGImageSourceCreateThumbnailWithTransform: true,
        kCGImageSourceThumbnailMaxPixelSize: 16384,
    ] as CFDictionary
    guard let source = CGImageSourceCreateWithURL(URL(fileURLWithPath: path) as CFURL, nil),
        let picture = CGImageSourceCreateThumbnailAtIndex(source, 0, options)
    else { throw CocoaError(.fileReadCorruptFile) }
    var buffer: CVPixelBuffer?
    CVPixelBufferCreate(nil, about.side, about.side, kCVPixelFormatType_32BGRA, nil, &buffer)
    CVPixelBufferLockBaseAddress(buffer!, [])
    defer { CVPixelBufferUnlockBaseAddress(buffer!, []) }
    let context = CGContext(
        data: CVPixelBufferGetBaseAddress(buffer!), width: about.side, height: about.side, bitsPerComponent: 8,
        bytesPerRow: CVPixelBufferGetBytesPerRow(buffer!), space: CGColorSpace(name: CGColorSpace.sRGB)!,
        bitmapInfo: CGImageAlphaInfo.noneSkipFirst.rawValue | CGBitmapInfo.byteOrder32Little.rawValue)!
    context.setFillColor(CGColor(red: 1, green: 1, blue: 1, alpha: 1))
    context.fill(CGRect(x: 0, y: 0, width: about.side, height: about.side))
    context.interpolationQuality = .high
    var (width, height) = (about.resized, about.resized)
    if about.resize == "shortest" {
        let short = min(picture.width, picture.height)
        (width, height) = (width * picture.width / short, height * picture.height / short)
    }
    context.draw(
        picture,
        in: CGRect(
            x: Double(about.side - width) / 2, y: Double(about.side - height) / 2, width: Double(width),
            height: Double(height)))
    return buffer!
}

func embed(_ tower: About.Tower, _ input: MLFeatureValue) throws -> [Float] {
    let model = try MLModel(contentsOf: MLModel.compileModel(at: here.appendingPathComponent(tower.file)))
    let given = try MLDictionaryFeatureProvider(dictionary: [tower.input: input])
    let values = try model.prediction(from: given).featureValue(for: tower.output)!.multiArrayValue!
    return (0..<values.count).map { values[$0].floatValue }
}

let about: About = try read("lapclip.json")
let picture = try embed(
    about.towers["image"]!, MLFeatureValue(pixelBuffer: middleSquare(CommandLine.arguments[1], about.preprocessing)))
for example in try read("examples.json") as [Example] {
    let tokens = try MLMultiArray(shape: [1, about.tokenizer.longest as NSNumber], dataType: .int32)
    for place in 0..<about.tokenizer.longest {
        let known = place < example.symbols.count
        tokens[place] = NSNumber(value: known ? example.symbols[place] : about.tokenizer.padding)
    }
    let caption = try embed(about.towers["text"]!, MLFeatureValue(multiArray: tokens))
    print(zip(picture, caption).map(*).reduce(0, +), example.caption)
}
